"""`POST /v1/completions`: decode, tokenise, generate, encode."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

from anyio import to_thread
from starlette.types import Receive, Scope, Send

from service.choices import begin, begin_copies, gather
from service.dialects import completions_decode
from service.dialects.completions_decode import CompletionRequest, Prompt
from service.dialects.completions_encode import (
    CompletionPrompt,
    CompletionStream,
    encode_completion,
)
from service.errors import ApiError, context_exceeded, invalid
from service.events import Event, RequestRecord
from service.services import Services
from service.telemetry.sinks import all_finished
from service.transport.http import (
    begin_record,
    read_request,
    send_answer,
    while_connected,
)
from service.transport.sse import send_choices


class Completions:
    """The endpoint, as an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing has been answered; ClientGone if the client left."""
        start_ns = time.monotonic_ns()
        services = self._services
        limits = services.settings.limits
        request = await read_request(
            scope,
            receive,
            partial(completions_decode.decode, card=services.card),
            limits,
            services.records,
            operation="text_completion",
            start_ns=start_ns,
        )
        num_choices = len(request.prompts) * request.n
        group = secrets.token_hex(8)
        records = [_record(scope, request, start_ns, group, n) for n in range(num_choices)]

        async def answer() -> None:
            with all_finished(services.records, records):
                async with AsyncExitStack() as stack:
                    await self._answer(scope, send, request, records, stack)

        await while_connected(receive, answer, records)

    async def _answer(
        self,
        scope: Scope,
        send: Send,
        request: CompletionRequest,
        records: list[RequestRecord],
        stack: AsyncExitStack,
    ) -> None:
        services = self._services
        prompts: list[CompletionPrompt] = []
        for index, prompt in enumerate(request.prompts):
            prompts.append(await self._prompt(request, prompt, index, records))
        first: list[Event] = []
        choices: list[AsyncGenerator[Event, None]] = []
        for index, tokenised in enumerate(prompts):
            mine = records[index * request.n : (index + 1) * request.n]
            try:
                more = await self._begin(request, tokenised, index, mine, stack)
            except ApiError as error:
                raise _of_prompt(error, _path(request, index)) from error
            first += more[0]
            choices += more[1]
        if request.stream:
            encoder = CompletionStream(request, prompts, services.card, services.assets.vocabulary)
            limits = services.settings.limits
            await send_choices(scope, send, first, choices, encoder, records, limits)
            return
        joined = await gather(choices)
        encode = partial(
            encode_completion,
            *(request, prompts, joined),
            *(services.card, services.assets.vocabulary),
        )
        # Log-probabilities of a long answer are hundreds of thousands of objects.
        many = any(choice.answer.tokens or choice.scored for choice in joined)
        await send_answer(send, 200, await to_thread.run_sync(encode) if many else encode())

    async def _begin(
        self,
        request: CompletionRequest,
        prompt: CompletionPrompt,
        index: int,
        records: list[RequestRecord],
        stack: AsyncExitStack,
    ) -> tuple[list[Event], list[AsyncGenerator[Event, None]]]:
        """All choices of one prompt. In a shown prompt each scores its own copy of it."""
        generator, wanted = self._services.generator, request.generation(index)
        run = generator.run_tokens(wanted, prompt.token_ids, records[0])
        admitted, events = await begin(stack, run)
        first, choices = await begin_copies(
            stack, generator, wanted, admitted, records[1:], scores=request.scores_echo
        )
        return [admitted, *first], [events, *choices]

    async def _prompt(
        self,
        request: CompletionRequest,
        prompt: Prompt,
        index: int,
        records: list[RequestRecord],
    ) -> CompletionPrompt:
        """The tokens of a text, or, where it is shown, the text of tokens; off the event loop.

        Raises ApiError for a text that is too long or has no tokens.
        """
        renderer = self._services.renderer
        if not isinstance(prompt, str):
            text = await renderer.detokenize(prompt) if request.echo else ""
            return CompletionPrompt(text, prompt)
        path = _path(request, index)
        try:
            self._check_length(prompt, path)
            ids: list[int] = (await renderer.tokenize(prompt, True)).tolist()
        except ApiError as error:
            raise _of_prompt(error, path) from error
        if not ids:
            raise invalid(path, f"Invalid '{path}': the prompt has no tokens.")
        records[index * request.n].stamp("tokenize", num_tokens=len(ids))
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


def _record(
    scope: Scope, request: CompletionRequest, start_ns: int, group: str, choice: int
) -> RequestRecord:
    record = begin_record(
        scope,
        operation="text_completion",
        model=request.model,
        start_ns=start_ns,
        stream=request.stream,
    )
    record.choice, record.num_choices = choice, len(request.prompts) * request.n
    record.num_per_prompt, record.group = request.n, group
    return record
