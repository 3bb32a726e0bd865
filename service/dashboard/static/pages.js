// Pages by state: each is in exactly one, so the bar is always full.

import { byId, count, element } from "./util.js";

const STATES = [
  ["referenced", "in use"],
  ["pinned", "leased"],
  ["cached", "cached"],
  ["free", "free"],
];

export class Pages {
  reset(hello) {
    byId("pages-title").textContent = `Pages of ${hello.page_size} tokens`;
  }

  show({ pool, evicted, disk }) {
    const bar = byId("pages");
    const legend = byId("pages-legend");
    if (!bar.children.length) {
      for (const [state] of STATES) {
        bar.append(element("span", `p-${state}`));
        const item = element("li");
        item.append(element("i", `p-${state}`), element("span"));
        legend.append(item);
      }
      legend.append(element("li"));
    }
    STATES.forEach(([state, word], i) => {
      bar.children[i].style.flex = `${pool[state]} 0 0`;
      legend.children[i].lastChild.textContent = `${count(pool[state])} ${word}`;
    });
    const gone = Object.values(evicted).reduce((sum, number) => sum + number, 0);
    const asides = [disk ? `${count(disk)} more on disk` : "", gone ? `${count(gone)} evicted since the start` : ""];
    legend.lastChild.textContent = asides.filter(Boolean).join(", ");
    bar.setAttribute("aria-label", STATES.map(([state, word]) => `${pool[state]} ${word}`).join(", "));
  }
}
