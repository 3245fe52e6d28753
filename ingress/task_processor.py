"""Carriers of durable jobs with Ray Serve's names. Loaded, with Celery, by those who name one."""

from __future__ import annotations

from ingress._unsupported import teller
from ingress.jobs.celery_adapter import CeleryTaskProcessorAdapter

__all__ = ["CeleryTaskProcessorAdapter"]
__getattr__ = teller(__name__)
