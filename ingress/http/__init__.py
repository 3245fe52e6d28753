"""What stands between the socket and a request: connections and their limits, and bodies."""
