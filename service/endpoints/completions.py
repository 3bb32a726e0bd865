"""`POST /v1/completions`: decode, tokenise, generate, encode."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from service.choices import Choice, begin, begin_copies
from service.dialects import completions_decode
from service.dialects.completions_decode import CompletionRequest, Prompt
from service.dialects.completions_encode import (
    CompletionPrompt,
    CompletionStream,
    encode_completion,
)
from service.endpoints.generating import Call, Generates
from service.endpoints.side_by_side import Begun, Dialect, answer_choices, choice_records
from service.errors import ApiError, context_exceeded, invalid
from service.events import RequestRecord


class Completions(Generates[CompletionRequest]):
    """The endpoint."""

    operation = "text_completion"

    def _decode(self, body: bytes) -> CompletionRequest:
        return completions_decode.decode(body, self._services.card)

    async def _answer(self, call: Call, request: CompletionRequest) -> None:
        records = choice_records(
            call,
            request.model,
            stream=request.stream,
            num_prompts=len(request.prompts),
            num_each=request.n,
        )
        begin_all = partial(self._begin_all, request, records)
        await answer_choices(call, self._services, records, begin_all)

    async def _begin_all(
        self, request: CompletionRequest, records: Sequence[RequestRecord], stack: AsyncExitStack
    ) -> tuple[Begun, Dialect]:
        prompts: list[CompletionPrompt] = []
        for index, prompt in enumerate(request.prompts):
            prompts.append(await self._prompt(request, prompt, index, records))
        begun = Begun()
        for index, tokenised in enumerate(prompts):
            mine = records[index * request.n : (index + 1) * request.n]
            try:
                begun.add(await self._begin(request, tokenised, index, mine, stack))
            except ApiError as error:
                raise _of_prompt(error, _path(request, index)) from error
        served = self._services.card, self._services.assets.vocabulary

        def whole(joined: Sequence[Choice]) -> bytes:
            return encode_completion(request, prompts, joined, *served)

        stream = partial(CompletionStream, request, prompts, *served) if request.stream else None
        return begun, Dialect(stream, whole)

    async def _begin(
        self,
        request: CompletionRequest,
        prompt: CompletionPrompt,
        index: int,
        records: Sequence[RequestRecord],
        stack: AsyncExitStack,
    ) -> Begun:
        """All choices of one prompt. In a shown prompt each scores its own copy of it."""
        generator, wanted = self._services.generator, request.generation(index)
        run = generator.run_tokens(wanted, prompt.token_ids, records[0])
        admitted, events = await begin(stack, run)
        first, choices = await begin_copies(
            stack, generator, wanted, admitted, records[1:], scores=request.scores_echo
        )
        return Begun([admitted, *first], [events, *choices])

    async def _prompt(
        self,
        request: CompletionRequest,
        prompt: Prompt,
        index: int,
        records: Sequence[RequestRecord],
    ) -> CompletionPrompt:
        """The tokens of a text, or, where it is shown, the text of tokens; off the event loop.

        Raises ApiError for a text that is too long or has no tokens.
        """
        renderer = self._services.renderer
        if not isinstance(prompt, str):
            text = await renderer.detokenize(prompt) if request.echo else ""
            return CompletionPrompt(text, prompt)
        path = _path(request, index)
        record = records[index * request.n]
        try:
            self._check_length(prompt, path)
            self._services.generator.refuse_early(
                len(prompt), request.generation(index).options, record
            )
            ids = await renderer.tokenize(prompt, True)
        except ApiError as error:
            raise _of_prompt(error, path) from error
        if not len(ids):
            raise invalid(path, f"Invalid '{path}': the prompt has no tokens.")
        self._services.generator.early.learn(len(prompt), len(ids))
        record.stamp("tokenize", num_tokens=len(ids))
        return CompletionPrompt(prompt, ids)

    def _check_length(self, text: str, path: str) -> None:
        """Refuse what cannot fit before it is tokenised."""
        max_context = self._services.card.max_context
        least = -(-len(text) // self._services.assets.vocabulary.max_token_bytes)
        if least >= max_context:
            raise context_exceeded(
                path,
                f"This model's maximum context length is {max_context} tokens; '{path}' has at "
                f"least {least}.",
            )


def _path(request: CompletionRequest, index: int) -> str:
    return f"prompt[{index}]" if len(request.prompts) > 1 else "prompt"


def _of_prompt(error: ApiError, path: str) -> ApiError:
    """A refusal by what this dialect calls the field."""
    if error.param not in ("messages", "token_ids", "prompt", "tokens"):
        return error
    return ApiError(
        error.status,
        error.message,
        type=error.type,
        code=error.code,
        param=path,
        headers=error.headers,
    )
