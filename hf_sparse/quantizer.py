"""hf_sparse as a quantization method of transformers: `AutoModelForCausalLM.from_pretrained` loads what hf_sparse
saved, or takes a `WeightOnlyQuantConfig`, and gives back the model that `SparseAutoModelForCausalLM` would.

transformers loads what lies outside the blocks; once it has, the blocks are read and packed tensor by tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import extract_commit_hash

from hf_sparse.modeling import family_of, hybrid_blocks, swap_blocks

from .algorithms import TUNED
from .auto import check_device_map, complete, head_format, weight_format
from .checkpoint import SafetensorsCheckpoint
from .config import SparseConfig, WeightOnlyQuantConfig
from .weights import load_weights


class SparseQuantizer(HfQuantizer):
    """See the module. Options of sparsity and placement have the defaults of `SparseAutoModelForCausalLM`."""

    quantization_config: WeightOnlyQuantConfig

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for a device map that the plan could not follow, and for an algorithm that needs the whole
        model at once.
        """
        check_device_map(device_map)
        if not self.pre_quantized and (algorithm := self.quantization_config.algorithm) in TUNED:
            raise ValueError(
                f"algorithm: got {algorithm!r}, allowed here are 'RTN' and 'HQQ'; for the others use "
                "hf_sparse.SparseAutoModelForCausalLM.from_pretrained"
            )

    def update_device_map(self, device_map: Any) -> None:
        """None: placement is the plan's."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        family_of(model.config.model_type)
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise ValueError("quantization_config: hf_sparse reads safetensors files only, and never unpickles weights")
        self._files = [Path(file) for file in checkpoint_files]
        swap_blocks(model, weight_format(self.quantization_config))
        ours = [
            f"{block.prefix}{name}"
            for block in hybrid_blocks(model)
            for quantized in (True, False)
            for name in block.expected_tensors(quantized)
        ]
        patterns = {rf"(^|\.){re.escape(name)}$" for name in ours}
        head = [path for path, module in model.named_modules() if module is model.get_output_embeddings()]
        patterns |= {rf"^{re.escape(path)}\.(codes|scales|offsets)$" for path in head}
        model._keys_to_ignore_on_load_unexpected = patterns.union(model._keys_to_ignore_on_load_unexpected or ())
        # packed: it comes when the rest is there
        missing = {rf"^{re.escape(path)}\.weight$" for path in head}
        model._keys_to_ignore_on_load_missing = missing.union(model._keys_to_ignore_on_load_missing or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        name, first = str(model.config._name_or_path), self._files[0]
        hub = {"revision": extract_commit_hash(str(first), None)}
        local = Path(name).is_dir() or hub["revision"] is None
        config_file = first.with_name(CONFIG_NAME)
        checkpoint = SafetensorsCheckpoint(
            self._files,
            config_file if config_file.is_file() else None,
            None if local else name,
            None if local else hub["revision"],
            weights=None,
        )
        del model.config.quantization_config
        load_weights(model, checkpoint, head_format(self.quantization_config), self.quantization_config.algorithm)

        def tokenizer() -> Any:
            try:
                return AutoTokenizer.from_pretrained(first.parent)
            except (OSError, ValueError, KeyError, TypeError):
                return None  # which calibration says

        return complete(
            model, checkpoint, self.quantization_config, SparseConfig(), hub={} if local else hub, tokenizer=tokenizer
        )

    def is_serializable(self) -> bool:
        """True: packed weights are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: packed weights have no gradients."""
        return False
