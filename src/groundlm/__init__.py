"""GroundLM: Grounded Prediction Networks, trained, compared and looked into.

Importing the package registers the model types `gpn` and `gated_delta_net` with transformers' Auto
classes.
"""

import os

# A thread that waits for the others turns for some microseconds and then sleeps. The scan's threads
# meet at every token: with libgomp's default, to turn on and on, a core that is shared with another
# process makes it many times slower. Read when torch is imported, so only if we come first.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from groundlm.baselines.gated_delta_net import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from groundlm.errors import UserError
from groundlm.model.config import GPNConfig
from groundlm.model.modeling import GPNForCausalLM, GPNModel
from groundlm.model.state import GPNState

__version__ = "0.1.0"

__all__ = [
    "GPNConfig",
    "GPNForCausalLM",
    "GPNModel",
    "GPNState",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "UserError",
    "__version__",
]
