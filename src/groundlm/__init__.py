"""GroundLM: Grounded Prediction Networks, trained, compared and looked into.

Importing the package registers the model type `gpn` with transformers' Auto classes.
"""

from groundlm.errors import UserError
from groundlm.model.config import GPNConfig
from groundlm.model.modeling import GPNForCausalLM, GPNModel
from groundlm.model.state import GPNState

__version__ = "0.1.0"

__all__ = ["GPNConfig", "GPNForCausalLM", "GPNModel", "GPNState", "UserError", "__version__"]
