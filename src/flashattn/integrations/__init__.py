"""The names that others' code already calls, on top of the public functions: flash-attn's, torch's SDPA, Transformers' attention.

Nothing here computes anything: a call is translated, or refused with the name of the argument that has no meaning here yet. Importing
`flashattn` loads none of it, and `flashattn.integrations.transformers` alone needs another package, when `register()` is called.
"""
