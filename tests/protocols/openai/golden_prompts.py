"""What tests of chat templates and tokenizers share, and the writer of `chat_templates/golden.json`.

That file has what transformers makes of the templates and conversations here.

Run it where transformers is installed, after a change of a template or of a conversation:

    python -m tests.protocols.openai.golden_prompts

The templates are our own, each in the format of a family of models; a comment in each names where that is described.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

FOLDER = Path(__file__).parent / "chat_templates"

GOLDEN = FOLDER / "golden.json"

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says the weather <now> of a "city" & more, such as Zürich',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}

#: Name → the fields of a request. Arguments of calls are objects here, and text in requests of clients.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": '  Hello "you" <b>&</b> 你好 🙂\n'}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    "three": {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
            {"role": "user", "content": "3"},
        ]
    },
    "no_prompt": {
        "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
        "add_generation_prompt": False,
    },
    "continued": {
        "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "The answer is "}],
        "continue_final_message": True,
    },
    "tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]},
    "called": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        ],
        "tools": [WEATHER],
    },
    "not_thinking": {
        "messages": [{"role": "user", "content": "1"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of a few words, which adds <s> at the beginning."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "user:hi;": 2, "hello": 3, "you": 4}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def main() -> None:
    """Write the file."""
    from transformers import PreTrainedTokenizerFast  # installed for this alone

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")), **TOKENS)
    golden: dict[str, dict[str, str | None]] = {}
    for file in sorted(FOLDER.glob("*.jinja")):
        golden[file.stem] = {}
        for name, fields in CONVERSATIONS.items():
            continues = fields.get("continue_final_message", False)
            try:
                text = tokenizer.apply_chat_template(
                    fields["messages"],
                    tools=fields.get("tools"),
                    chat_template=file.read_text(encoding="utf-8"),
                    add_generation_prompt=not continues and fields.get("add_generation_prompt", True),
                    continue_final_message=continues,
                    tokenize=False,
                    **fields.get("chat_template_kwargs", {}),
                )
            except Exception:  # the template refuses the conversation
                text = None
            golden[file.stem][name] = text
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
