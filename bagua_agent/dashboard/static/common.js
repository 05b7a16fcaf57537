// What the pages of a job and of a cluster have in common: the verdict, facts, and asking again and again.

import { byId, element, setText } from "./dom.js";
import { moment } from "./format.js";

const EVERY_MS = 1000;
const ANSWER_MS = 8000;
const GONE_AFTER = 3; // requests in a row without the page's data
const LONGEST_LINE = 200; // of a refusal

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

// Returns { said }, the JSON of an answer, or { trouble }, a sentence on why there is none. A proxy or a revoked
// certificate is answered in another form than JSON.
export async function ask(path, options) {
  let answer, text;
  try {
    answer = await fetch(path, options);
    text = await answer.text();
  } catch (error) {
    if (!(error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError")) throw error;
    return { trouble: "The server of this page does not answer." };
  }
  const said = answer.ok ? parsed(text) : null;
  if (said) return { said };
  const line = text.trimStart().startsWith("<") ? "" : text.trim().split("\n", 1)[0].slice(0, LONGEST_LINE);
  const status = answer.ok ? "with something other than JSON" : `with status ${answer.status}`;
  return { trouble: `The server of this page answers ${status}${line && `: ${line}`}.` };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// Asks for the page's data and shows it; gone(trouble) is called with each request of an outage from the third on.
export async function keepAsking(show, gone) {
  let failed = 0;
  const look = async () => {
    try {
      const { said: page, trouble } = await ask("api/page", { signal: AbortSignal.timeout(ANSWER_MS) });
      if (page) {
        failed = 0;
        problem(page.problem ?? "");
        if (page.verdict) show(page);
      } else {
        failed += 1;
        if (failed >= GONE_AFTER) await gone(trouble);
      }
    } finally {
      setTimeout(look, EVERY_MS);
    }
  };
  await look();
}

// page: the last one that came; null before the first.
export function showStale(trouble, page) {
  problem(`${trouble} ${page ? `The page shows what was so at ${moment(page.at)}, and` : "The page"} goes on when its data comes.`);
}
