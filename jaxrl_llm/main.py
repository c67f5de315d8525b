"""`python -m jaxrl_llm.main --config=FILE [--config.a.b=v ...]`: train. The settings are checked before JAX loads."""

import sys

from jaxrl_llm.commands import train

if __name__ == "__main__":
    sys.exit(train.run(sys.argv[1:], prog="python -m jaxrl_llm.main"))
