"""`python -m groundlm`, the form that torchrun starts."""

import sys

from groundlm.cli import main

sys.exit(main())
