"""GroundLM: Grounded Prediction Networks, trained, compared and looked into.

Importing the package registers the model types `gpn` and `gated_delta_net` with transformers' Auto
classes.
"""

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
