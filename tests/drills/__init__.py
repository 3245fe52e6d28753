"""Six incidents against a real server, and the seconds until each view names the cause."""
