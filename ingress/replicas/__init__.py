"""Replicas, and how calls come to them."""
