"""The analysis of an application before it runs.

explain   the place where each callable runs, at either value of the flag, and the findings
sources   the tasks, streams and files that a function hands to Starlette, read from its source
table     an explanation for a terminal, and as JSON
"""

from ingress.observe.inspection.explain import Explanation, Level, Place, Remark, Row, explain

__all__ = ["Explanation", "Level", "Place", "Remark", "Row", "explain"]
