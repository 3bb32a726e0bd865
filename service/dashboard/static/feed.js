// The live feed: server-sent events over fetch, so that a key can go in a header. Comes back by
// itself; is let go while the tab is hidden, so that nobody looks at the engine for nothing.

import { endpoint, headers } from "./util.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;

export class Feed {
  constructor(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
    this.stopper = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  // Begin anew, with whatever key there is now.
  start() {
    this.stop();
    this.stopper = new AbortController();
    this.read(this.stopper.signal);
  }

  stop() {
    clearTimeout(this.timer);
    this.stopper?.abort();
    this.stopper = null;
  }

  async read(signal) {
    try {
      const answer = await fetch(endpoint("admin/feed"), { headers: headers(), signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        this.onState(answer.status === 401 ? "locked" : "tenant");
        return;
      }
      if (!answer.ok) throw new Error(`the feed answered ${answer.status}`);
      this.pause = FIRST_PAUSE_MS;
      await this.take(answer.body.pipeThrough(new TextDecoderStream()).getReader());
      throw new Error("the feed has ended");
    } catch (error) {
      if (signal.aborted) return;
      this.onState("lost");
      this.timer = setTimeout(() => this.start(), this.pause);
      this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 2);
    }
  }

  async take(reader) {
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        if (frame.startsWith("data: ")) this.onMessage(JSON.parse(frame.slice(6)));
      }
    }
  }
}
