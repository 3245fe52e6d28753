"""The same no-op on other servers; each module here runs in its peer's own environment."""
