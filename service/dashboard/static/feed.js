// The live feed: a WebSocket on which only the server speaks. Comes back by itself; is let go while
// the tab is hidden, so that nobody looks at the engine for nothing.

import { apiKey, endpoint, headers } from "./util.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;
// A handshake has no headers of ours: a key goes in the name of a protocol beside one to accept.
const PROTOCOL = "headwater.feed";
const KEY_PROTOCOL = "openai-insecure-api-key.";
const NAME = /^[\w!#$%&'*+.^`|~-]+$/;

export class Feed {
  constructor(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
    this.socket = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  // Begin anew, with whatever key there is now.
  start() {
    this.stop();
    const key = apiKey();
    const offered = NAME.test(key) ? [PROTOCOL, KEY_PROTOCOL + key] : [PROTOCOL];
    const url = endpoint("admin/feed");
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url, offered);
    this.socket = socket;
    socket.addEventListener("message", ({ data }) => {
      this.pause = FIRST_PAUSE_MS;
      if (this.socket === socket) this.onMessage(JSON.parse(data));
    });
    socket.addEventListener("close", () => this.lose(socket));
  }

  stop() {
    clearTimeout(this.timer);
    const { socket } = this;
    this.socket = null;
    socket?.close();
  }

  // Why a handshake fails is not told to a page; whether the key opens this door is.
  async lose(socket) {
    if (this.socket !== socket) return;
    const answer = await fetch(endpoint("admin/pool"), { headers: headers(), cache: "no-store" }).catch(() => null);
    if (this.socket !== socket) return;
    if (answer?.status === 401 || answer?.status === 403) {
      this.onState(answer.status === 403 ? "tenant" : apiKey() ? "wrong" : "locked");
      return;
    }
    this.onState("lost");
    this.timer = setTimeout(() => this.start(), this.pause);
    this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 2);
  }
}
