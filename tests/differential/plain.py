"""Answers for plain renderings: `python -m tests.differential.plain`, a line for each seed.

This process does not import ingress, which stands in for functions of FastAPI's.
"""

from __future__ import annotations

import json
import logging
import sys
import types
import warnings

from tests.differential.asking import answers
from tests.differential.programs import program


def answers_of(seed: int) -> object:
    made = program(seed)
    module = types.ModuleType(f"plain_{seed}")
    sys.modules[module.__name__] = module
    try:
        text = made.text(plain=True)
        code = compile(text, f"{module.__name__}.py", "exec", dont_inherit=True)
        exec(code, vars(module))
        return answers(module.app, made)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del sys.modules[module.__name__]


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(answers_of(int(line))), flush=True)
    assert "ingress" not in sys.modules


if __name__ == "__main__":
    main()
