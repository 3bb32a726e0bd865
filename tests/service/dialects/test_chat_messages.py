"""What a chat body's prompt says to the template."""

from service.dialects.chat_messages import Prompt, WireMessage, decode_conversation


def test_effort_and_verbosity_are_told_to_the_template() -> None:
    messages = [WireMessage("user", "hi")]
    prompt = Prompt(messages, reasoning_effort="low", verbosity="high")
    hints = {"reasoning_effort": "low", "verbosity": "high"}
    assert decode_conversation(prompt).template_kwargs == hints
    own = Prompt(messages, verbosity="high", chat_template_kwargs={"verbosity": "x"})
    assert decode_conversation(own).template_kwargs == {"verbosity": "x"}
    assert decode_conversation(Prompt(messages)).template_kwargs == {}
