"""The OpenAI HTTP interface as plain values: what may be asked, what is answered, what is refused.

Pure: JSON in, dataclasses out, and back. Knows no sockets, no tokenizer and no model process.
Source of the shapes: https://platform.openai.com/docs/api-reference (completions, chat, models,
errors), with what vLLM adds to them (`top_k`, `ignore_eos`).
"""
