// Ask the model over the Responses WebSocket, and see what of each prompt the cache already had.

import { apiKey, byId, count, durationText, element, endpoint, headers } from "./util.js";

const SYSTEM =
  "You are a helpful assistant in a small workshop beside a river. Answer in a few plain sentences. " +
  "If you do not know something, say so. Do not repeat the question. Prefer short words to long ones, " +
  "name things by their usual names, and give one example where it helps.";

const REASONS = {
  cold: () => "Nothing stored begins like this prompt: it was computed from its first token.",
  too_short: () => "The prompt is shorter than one page, and only whole pages are shared from cold.",
  diverged: (at) => `From there on it differs${within(at)}${against(at)}`,
  history_rewritten: (at) => `The history is told otherwise than it was computed${within(at)}${against(at)}`,
  evicted: (at, cache) => `The rest was evicted ${durationText(1000 * (cache.evicted_seconds_ago ?? 0))} ago to make room.`,
  namespace: () => "More of it is cached, but under another cache salt.",
  disabled: () => "This request may not use the cache.",
};

function within(at) {
  if (!at?.section) return "";
  const { type, index, name } = at.section;
  return `, in ${type} ${index + 1} (${name})`;
}

function against(at) {
  if (!at) return ".";
  const said = `: it says “${at.prompt}”`;
  return at.stored === null ? `${said}.` : `${said}, stored is “${at.stored}”.`;
}

export class Playground {
  constructor() {
    byId("system").value = SYSTEM;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask();
      }
    });
    byId("stop").addEventListener("click", () => this.drop());
    byId("ask-new").addEventListener("click", () => {
      this.reset();
      byId("text").focus();
    });
    this.socket = null;
    this.turn = null;
    this.reset();
  }

  reset() {
    this.drop();
    this.turn = null;
    this.setBusy(false);
    this.messages = [];
    byId("talk").replaceChildren();
  }

  // Ends the socket, which ends what runs on it.
  drop() {
    this.socket?.close();
    this.socket = null;
  }

  ask() {
    const text = byId("text").value.trim();
    if (!text || this.turn) return;
    byId("text").value = "";
    this.messages.push({ role: "user", content: text });
    this.turn = this.addTurn(text);
    this.turn.asked = performance.now();
    this.setBusy(true);
    const request = {
      type: "response.create",
      model: "default",
      instructions: byId("system").value.trim() || undefined,
      input: this.messages,
      temperature: 0.3,
      max_output_tokens: 400,
      store: false,
      cache_report: true,
    };
    this.turn.prompt = { instructions: request.instructions, messages: [...this.messages] };
    this.send(JSON.stringify(request));
  }

  send(frame) {
    if (this.socket?.readyState === WebSocket.OPEN) {
      this.socket.send(frame);
      return;
    }
    try {
      const url = endpoint("v1/responses");
      url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
      const key = apiKey();
      const socket = new WebSocket(url, key ? ["responses", `openai-insecure-api-key.${key}`] : []);
      this.socket = socket;
      socket.addEventListener("open", () => socket.send(frame));
      socket.addEventListener("message", (event) => this.take(JSON.parse(event.data)));
      socket.addEventListener("close", () => {
        if (this.socket === socket) this.socket = null;
        if (this.turn && !this.socket) this.finish(this.turn.text ? "Stopped." : "The server cannot be reached, or does not know this key.");
      });
    } catch {
      this.finish("This key cannot be used.");
    }
  }

  take(event) {
    const { turn } = this;
    if (!turn) return;
    if (event.type === "response.output_text.delta") {
      if (!turn.text) turn.first = performance.now();
      turn.text += event.delta;
      turn.answer.textContent = turn.text;
      this.follow();
    } else if (event.type === "response.completed" || event.type === "response.incomplete") {
      this.messages.push({ role: "assistant", content: turn.text });
      this.tellCache(turn, event.response.usage);
      this.finish("");
    } else if (event.type === "response.failed" || event.type === "error") {
      this.finish((event.response?.error ?? event.error)?.message ?? "The request failed.");
    }
  }

  finish(wrong) {
    const { turn } = this;
    this.turn = null;
    this.setBusy(false);
    if (!turn) return;
    turn.answer.classList.remove("running");
    if (!wrong) return;
    turn.box.append(element("p", "wrong", wrong));
    // What was not answered is not part of the conversation.
    if (turn.text) this.messages.push({ role: "assistant", content: turn.text });
    else this.messages.pop();
    this.follow();
  }

  addTurn(text) {
    const box = element("div", "turn");
    const answer = element("p", "answer running");
    const share = element("div", "share");
    box.append(element("p", "said", text), share, answer);
    byId("talk").append(box);
    this.follow();
    return { box, answer, share, text: "" };
  }

  follow() {
    const talk = byId("talk");
    talk.scrollTop = talk.scrollHeight;
  }

  setBusy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
  }

  tellCache(turn, usage) {
    const cached = usage.input_tokens_details.cached_tokens;
    const total = usage.input_tokens;
    const bar = element("span", "bar");
    bar.append(element("span"));
    bar.firstChild.style.width = `${(100 * cached) / total}%`;
    const words = element("p", "words");
    words.append(element("b", "", `${count(cached)} of ${count(total)}`), " prompt tokens from cache");
    if (turn.first) words.append(`, first token after ${durationText(turn.first - turn.asked)}`);
    words.append(`. ${explain(usage.cache, cached, total)}`);
    turn.share.append(bar, words, this.promptDetails(turn.prompt, cached, total));
    this.follow();
  }

  // The prompt as the model read it, what came from the cache shaded; fetched when it is opened.
  promptDetails(prompt, cached, total) {
    const details = element("details");
    details.append(element("summary", "", "Show the prompt"));
    details.addEventListener("toggle", () => this.fillPrompt(details, prompt, cached, total), { once: true });
    return details;
  }

  async fillPrompt(details, { instructions, messages }, cached, total) {
    const system = instructions ? [{ role: "system", content: instructions }] : [];
    const text = element("p", "prompt");
    text.tabIndex = 0;
    details.append(text);
    try {
      const { tokens } = await post("tokenize", { messages: [...system, ...messages] });
      const [known, fresh] = await Promise.all([
        post("detokenize", { tokens: tokens.slice(0, cached) }),
        post("detokenize", { tokens: tokens.slice(cached) }),
      ]);
      text.append(element("mark", "", known.prompt), fresh.prompt);
      if (tokens.length !== total) details.append(element("p", "note", "Answers are replayed as the tokens they were made of, so the edge may be off by a few."));
    } catch (error) {
      text.textContent = error.message;
    }
  }
}

function explain(cache, cached, total) {
  if (!cache) return "";
  const why = REASONS[cache.reason];
  if (why) return why(cache.first_divergence, cache);
  return cached >= total - 1 ? "All of it was there." : "All that was ever computed of it was there; the rest is new.";
}

async function post(path, body) {
  const answer = await fetch(endpoint(path), {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(`The prompt cannot be shown: the server answered ${answer.status}.`);
  return answer.json();
}
