// Shows the output, the stacks or the collectives of one worker in a dialog. Output is followed while it is open.

import { ask } from "./common.js";
import { byId, setText } from "./dom.js";

const FOLLOW_MS = 1000;
const LONGEST = 400000; // characters that the dialog keeps

export class Panel {
  constructor() {
    this.dialog = byId("panel");
    this.text = byId("panel-text");
    this.note = byId("panel-note");
    this.opened = 0; // counts what was opened, so that a late answer is of nothing that is shown
    byId("panel-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => (this.opened += 1));
    for (const radio of document.querySelectorAll("input[name=stream]")) {
      radio.addEventListener("change", () => this.worker && this.openLog(this.worker));
    }
  }

  begin(title, streams) {
    this.opened += 1;
    setText(byId("panel-title"), title);
    byId("panel-streams").hidden = !streams;
    this.text.textContent = "";
    this.note.textContent = "";
    if (!this.dialog.open) this.dialog.showModal();
    return this.opened;
  }

  async openLog(worker) {
    this.worker = worker;
    const mine = this.begin(`Output of ${worker.name}`, true);
    const stream = document.querySelector("input[name=stream]:checked").value;
    let position = 0;
    while (this.opened === mine) {
      const { said: part, trouble } = await ask(`api/log/${worker.agent}/${worker.slot}/${stream}/${position}`);
      if (this.opened !== mine) return;
      if (!part || part.problem) {
        setText(this.note, trouble ?? part.problem);
      } else if (!part.kept) {
        setText(this.note, "Nothing yet. A worker that is alone in a terminal writes there itself; --tee 3 keeps its output too.");
      } else {
        if (part.position > position) {
          setText(this.note, "Earlier output is not kept any more.");
          // what began before the gap does not go on after it
          if (this.text.textContent && !this.text.textContent.endsWith("\n")) this.append("\n");
        }
        position = part.next;
        if (part.text) this.append(part.text);
      }
      await new Promise((done) => setTimeout(done, FOLLOW_MS));
    }
  }

  append(text) {
    const { text: box } = this;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    box.textContent = (box.textContent + text).slice(-LONGEST);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  openStacks(worker) {
    return this.show("stacks", `Stacks of ${worker.name}`, worker, "Asking the worker…");
  }

  openCollectives(worker) {
    return this.show("collectives", `Collectives of ${worker.name}`, worker, "Asking all workers of the job…");
  }

  async show(what, title, worker, asking) {
    this.worker = null;
    const mine = this.begin(title, false);
    setText(this.note, asking);
    const { said, trouble } = await ask(`api/${what}/${worker.agent}/${worker.slot}`, { headers: { "X-Bagua-Page": "1" } });
    if (this.opened !== mine) return;
    setText(this.note, trouble ?? (said.problem || "Taken just now."));
    this.text.textContent = said?.text || "";
  }
}
