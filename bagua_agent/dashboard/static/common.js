// What the pages of a job and of a cluster have in common: the verdict, facts, and asking again and again.

import { byId, element, setText } from "./dom.js";

const EVERY_MS = 1000;
const ANSWER_MS = 8000;
const GONE_AFTER = 3; // requests in a row without an answer

export function showVerdict({ level, what, why, next }, title) {
  byId("verdict").dataset.level = level;
  setText(byId("what"), what);
  setText(byId("why"), why);
  setText(byId("next"), next);
  document.title = `${level === "good" ? "" : "⚠ "}${title} – Bagua`;
}

// facts: pairs of a name and a text.
export function showFacts(list, facts) {
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(() => {
      const pair = element("div");
      pair.append(element("dt"), element("dd"));
      return pair;
    }));
  }
  facts.forEach(([name, value], index) => {
    setText(list.children[index].children[0], name);
    setText(list.children[index].children[1], value);
  });
}

// parts: { name, share, text, place } in order; place is the number of a colour.
export function showBar(bar, legend, parts, label) {
  bar.replaceChildren(...parts.map(({ share, place }) => {
    const piece = element("span", "", `u${place}`);
    piece.style.flexGrow = share;
    return piece;
  }));
  legend.replaceChildren(...parts.map(({ text, place }) => {
    const item = element("li");
    item.append(element("i", "", `u${place}`), text);
    return item;
  }));
  if (parts.length) bar.setAttribute("aria-label", label);
}

export function problem(text) {
  byId("problem").hidden = !text;
  setText(byId("problem"), text);
}

// Asks for the page's data and shows it; gone() is called with each request of an outage from the third on.
export async function keepAsking(show, gone) {
  let failed = 0;
  const look = async () => {
    try {
      const answer = await fetch("api/page", { signal: AbortSignal.timeout(ANSWER_MS) });
      const page = await answer.json();
      problem(page.problem ?? "");
      if (page.verdict) show(page);
      failed = 0;
    } catch (error) {
      if (!(error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError")) throw error;
      failed += 1;
      if (failed >= GONE_AFTER) await gone();
    } finally {
      setTimeout(look, EVERY_MS);
    }
  };
  await look();
}
