"""The `LoggingConfig` of the process, and those of its deployments.

A deployment without a config has its application's. Only options that are given count: one that
its config leaves out is the process's. `LOGS` is the one instance.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingress.config import LoggingConfig

ACCESS = "ingress.access"
RAY = "ray.serve"
LOGGERS = ("ingress", ACCESS, RAY)
"""The loggers that `LoggingConfig` is for. `ray.serve` is the name in code of Ray Serve's users."""


@dataclass(eq=False, slots=True)
class LogOptions:
    """The options of logging that count now. Thread-safe.

    config       of the process
    has_handlers the handlers of this package print the records, so that `encoding` counts for all
    is_logged    requests are logged, unless the option of their deployment says otherwise
    """

    config: LoggingConfig = field(default_factory=LoggingConfig)
    has_handlers: bool = False
    is_logged: bool = False
    # Replaced as a whole: any thread reads it while the control loop changes it.
    _by_deployment: Mapping[tuple[Any, Any], LoggingConfig] = field(default_factory=dict)
    _own_levels: dict[str, int] = field(default_factory=dict)  # before an option was given
    # For records of deployments without a level.
    _defaults: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set_application(self, name: str, configs: Mapping[str, LoggingConfig | None]) -> None:
        """Set the configs of an application's deployments; none if it does not run any more."""
        with self._lock:
            kept = {key: each for key, each in self._by_deployment.items() if key[0] != name}
            new = {(name, key): each for key, each in configs.items() if each is not None}
            self._by_deployment = {**kept, **new}
            self._set_levels()

    def set_process(self, config: LoggingConfig) -> None:
        with self._lock:
            self.config = config
            self._set_levels()

    def given(self, application: str, deployment: str, option: str) -> Any:
        """Return an option for records of a deployment, `None` if it was given nowhere."""
        for config in (self._by_deployment.get((application, deployment)), self.config):
            if config is not None and _has(config, option):
                return getattr(config, option)
        return None

    def of(self, record: logging.LogRecord, option: str) -> Any:
        """Return an option for a record, `None` if it was given nowhere."""
        fields = record.__dict__
        return self.given(fields.get("application", ""), fields.get("deployment", ""), option)

    def level_of(self, record: logging.LogRecord) -> int:
        """Return the least level for the deployment of a record."""
        fields = record.__dict__
        config = self._by_deployment.get((fields.get("application"), fields.get("deployment")))
        if config is not None and _has(config, "log_level"):
            return number_of(config.log_level)
        return self._defaults.get(record.name, 0) if record.name in self._own_levels else 0

    def logs_access(self, application: str, deployment: str) -> bool:
        """Return whether requests to a deployment are logged."""
        config = self._by_deployment.get((application, deployment))
        return config is None or config.enable_access_log

    @property
    def is_used(self) -> bool:
        """Return whether an option was given anywhere."""
        return bool(self._by_deployment or self.config.model_fields_set)

    def _set_levels(self) -> None:
        """Let the loggers pass the records of the deployment with the least level.

        The filter drops those of the others.
        """
        configs = list(self._by_deployment.values())
        given = [number_of(each.log_level) for each in configs if _has(each, "log_level")]
        for name in LOGGERS:
            logger = logging.getLogger(name)
            own = self._own_levels.pop(name, logger.level)
            logger.setLevel(own)
            is_given = _has(self.config, "log_level")
            if given or is_given:
                self._own_levels[name] = own
                default = number_of(self.config.log_level) if is_given else 0
                default = default or logger.getEffectiveLevel()
                self._defaults[name] = default
                logger.setLevel(min([default, *given]))


def _has(config: LoggingConfig, option: str) -> bool:
    return option in config.model_fields_set


def number_of(level: str | int) -> int:
    return level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]


LOGS = LogOptions()
