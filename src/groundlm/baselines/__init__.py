"""What GPN is compared with: transformers' own classes, at equal parameters.

Transformer++ is its `llama`, Mamba-2 its `mamba2`; `gated_delta_net` stacks its Gated DeltaNet
layers without attention.
"""
