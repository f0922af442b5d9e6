"""Small tokenizers with the chat templates of well-known model families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nFunction signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call> XML tags<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Llama 3.1 writes a tool's answer as JSON, and drops the words beside a tool call.
LLAMA31 = (
    "{{- bos_token }}{% for message in messages %}{% if message.role == 'ipython' or message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{% if message.content is iterable %}"
    "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}"
    "{% elif message.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{% set call = message.tool_calls[0].function %}{{ \'{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\n' + "
    "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + "
    "'<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The reasoning part of Qwen3's and DeepSeek's templates.
REASONING = (
    "{% for message in messages %}{% set content = message.content %}{% if message.role == 'assistant' and "
    "'</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
ADJACENT = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '<|im_end|>' }}"

CORPUS = [
    "The quick brown fox jumps over the lazy dog. A system message, a user message and an assistant message.",
    "user assistant system tool model\n\nWhat is the answer? <|im_start|> </s> [INST] question: word words",
]


def wrap(backend: Tokenizer, template: str | None, **named: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)


def byte_level(
    template: str | None,
    special: Sequence[str],
    added: Sequence[str | AddedToken] = (),
    *,
    bos: bool = False,
    **named: str,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like those of GPT-2, Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
        ),
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([text if isinstance(text, AddedToken) else AddedToken(text, normalized=False) for text in added])
    if bos:
        first = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    return wrap(backend, template, **named)


def sentencepiece(template: str | None, *, legacy: bool, added: Sequence[AddedToken] = (), **named: str) -> Any:
    """A BPE tokenizer with byte fallback like those of Llama 2, Mistral, Gemma and Phi-3."""
    characters = [*sorted(set("".join(CORPUS)) - {" ", "\n"}), "\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "\u2581w", "or", "ord"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [("\u2581", "w"), ("o", "r"), ("or", "d")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens(list(added))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrap(backend, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **named)


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
PHI_TURNS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"]


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, normalized=False, special=True) for text in texts]


def llama(template: str) -> Any:
    return byte_level(template, HEADERS, bos=True, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def phi3() -> Any:
    """Turn markers that are not special and take the space behind them."""
    added = [AddedToken(text, normalized=False, rstrip=True) for text in PHI_TURNS[:4]]
    return sentencepiece(PHI3, legacy=True, added=added)


MAKERS: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: byte_level(
        SMOLLM2, CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    ),
    "qwen2.5": lambda: byte_level(
        QWEN25, CHATML, ["<tool_call>", "</tool_call>"], eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ),
    "llama3": lambda: llama(LLAMA3),
    "llama3.1": lambda: llama(LLAMA31),
    "mistral": lambda: sentencepiece(MISTRAL, legacy=False),
    "mistral-tokens": lambda: sentencepiece(MISTRAL, legacy=False, added=special("[INST]", "[/INST]")),
    "mistral-legacy": lambda: sentencepiece(MISTRAL, legacy=True),
    "gemma2": lambda: sentencepiece(GEMMA2, legacy=False, added=special("<start_of_turn>", "<end_of_turn>")),
    "phi3": phi3,
    "phi4": lambda: byte_level(PHI4, ["<|endoftext|>"], PHI_TURNS, eos_token="<|endoftext|>"),
    "reasoning": lambda: byte_level(REASONING, CHATML, ["<think>", "</think>"], eos_token="<|im_end|>"),
}
NO_SYSTEM = {"mistral", "mistral-tokens", "mistral-legacy", "gemma2"}

# The tools branches of three more families, shortened.
LLAMA31_TOOLS = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with JSON for a function call: ' }}
    {{- '{"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
    {{- messages[0]['content'] | trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_TOOLS = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- set ns = namespace(turn=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ("user", "assistant") and not message.tool_calls %}
        {%- if (message.role == "user") != (ns.turn % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
    {%- if message.role == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- "]" + eos_token if loop.last else ", " }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
PHI4_TOOLS = (
    "{% for message in messages %}{% if message['role'] == 'system' and tools %}"
    "{{ '<|system|>' + message['content'] + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
