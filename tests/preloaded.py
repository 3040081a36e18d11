"""What processes that tests fork have imported: what every conversion imports."""

import torch  # noqa: F401
from transformers import OlmoeForCausalLM, SwitchTransformersForConditionalGeneration  # noqa: F401

import moeconv.command.cli
import moeconv.conversion.conversion  # noqa: F401
