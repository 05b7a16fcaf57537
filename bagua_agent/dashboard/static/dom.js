// Changes the page without losing the reader's focus: rows are kept by key, and only texts that differ are written.

export const byId = (id) => document.getElementById(id);

export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// items: in order. key(item): unique. cells(item): texts of the cells; a function instead of a text fills its cell once
// and again whenever the number that `version(item)` gives changes.
export function rows(body, items, { key, cells, className = () => "", wide = [], version = () => 0 }) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let before = null;
  for (const item of items) {
    const id = String(key(item));
    const texts = cells(item);
    let row = known.get(id);
    known.delete(id);
    if (row && row.dataset.version !== String(version(item))) {
      row.remove();
      row = undefined;
    }
    if (!row) {
      row = element("tr");
      row.dataset.key = id;
      row.dataset.version = version(item);
      texts.forEach((text, index) => {
        const cell = element("td", "", wide.includes(index) ? "wide" : "");
        if (typeof text === "function") text(cell);
        row.append(cell);
      });
    }
    texts.forEach((text, index) => typeof text !== "function" && setText(row.children[index], text));
    const name = className(item);
    if (row.className !== name) row.className = name;
    const wanted = before ? before.nextSibling : body.firstChild;
    if (wanted !== row) body.insertBefore(row, wanted);
    before = row;
  }
  for (const row of known.values()) row.remove();
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
