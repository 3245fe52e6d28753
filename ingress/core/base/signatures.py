"""The signature of a function of the user's, whatever its annotations name.

From Python 3.14 on an annotation is evaluated when it is read. It may name a class that is defined
later, or one that only a type checker imports: then reading it raises `NameError`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from ingress.core.base.foreign import attempt

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    def signature_of(func: Callable[..., Any]) -> inspect.Signature:
        """Return a signature; an annotation that names what is not there is a `ForwardRef`."""
        # `Api | None` in a method of Api raises: its name is a deployment's by now.
        return attempt(
            lambda: inspect.signature(func, annotation_format=Format.FORWARDREF),
            lambda _: inspect.signature(func, annotation_format=Format.STRING),
        )

    def annotations_of(func: Callable[..., Any]) -> dict[str, Any]:
        """Return the annotations by name; one that names what is not there is a `ForwardRef`."""
        return attempt(
            lambda: get_annotations(func, format=Format.FORWARDREF),
            lambda _: get_annotations(func, format=Format.STRING),
        )

else:
    signature_of = inspect.signature
    annotations_of = inspect.get_annotations
