"""The README's code, as a script: one import replaced, text streams out.

python scripts/quickstart.py MODEL [--gguf-file FILE]
"""

from __future__ import annotations

import argparse

from transformers import AutoTokenizer, TextStreamer

from hf_sparse import SparseAutoModelForCausalLM as AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a directory or a hub id")
parser.add_argument("--gguf-file", help="name of a GGUF file in it")
parser.add_argument("--prompt", default="Once upon a time, in a village by the sea,")
parser.add_argument("--gpu-budget", default=None, help='"11GB", "80%%", bytes')
arguments = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(arguments.model, gguf_file=arguments.gguf_file)
model = AutoModelForCausalLM.from_pretrained(
    arguments.model, gguf_file=arguments.gguf_file, load_in_4bit=True, gpu_budget=arguments.gpu_budget
)
inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
model.generate(**inputs, streamer=TextStreamer(tokenizer), max_new_tokens=100)
