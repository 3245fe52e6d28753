"""The same no-op on other servers; each module here is run by that peer's own environment."""
