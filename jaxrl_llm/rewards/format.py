"""The format reward: does a pattern occur in the response?"""

import re


def score(response: str, *, pattern: str) -> float:
    """1.0 where the regular expression `pattern` is found anywhere in `response` (`.` also matches newlines), else 0.0.

    Raises:
        re.error: a pattern that does not compile (`table.check_functions` and `make_grader` refuse it before a run).
    """
    return float(re.search(pattern, response, re.DOTALL) is not None)
