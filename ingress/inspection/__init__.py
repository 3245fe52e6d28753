"""What there is to know of an application before it runs.

explain   where each of its callables runs, at either value of the flag, and what is to be said
sources   what a function hands to Starlette, read from its source
table     the same for a terminal, and as JSON
"""

from ingress.inspection.explain import Explanation, Finding, Level, Place, Row, explain

__all__ = ["Explanation", "Finding", "Level", "Place", "Row", "explain"]
