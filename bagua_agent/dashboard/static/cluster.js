// Asks for the cluster's data once a second and shows it. What the page says is decided where it is served.

import { keepAsking, showStale, showBar, showFacts, showVerdict } from "./common.js";
import { byId, element, rows, setText } from "./dom.js";
import { moment, number, percent, seconds } from "./format.js";

const COLOURS = { used: 0, free: 3, drained: 6, trouble: 1, absent: 8 };
let last = null;

function linkTo(job) {
  const link = element("a", job);
  link.href = `job/${encodeURIComponent(job)}/`;
  return link;
}

// A table of these items, or the sentence that says that there is none.
function showTable(id, items, options) {
  const body = byId(id);
  byId(`${id}-none`).hidden = items.length > 0;
  body.closest(".scroll").hidden = !items.length;
  rows(body, items, options);
}

function showHead(page) {
  showVerdict(page.verdict, "Cluster");
  setText(byId("served"), `${page.served_by ? `served by the daemon of ${page.served_by}, ` : ""}as of ${moment(page.at)}`);
  const { nodes, ready, going, waiting, ended } = page.counts;
  const total = page.slots.reduce((sum, part) => sum + part.slots, 0);
  const used = page.slots.find((part) => part.use === "used")?.slots ?? 0;
  showFacts(byId("facts"), [
    ["Nodes ready", `${number(ready)} of ${number(nodes)}`],
    ["Slots in use", `${number(used)} of ${number(total)}`],
    ["Jobs that run", number(going)],
    ["Jobs that wait", number(waiting)],
    ["Jobs that ended", number(ended)],
    ["Scheduler", page.scheduler || "none"],
  ]);
  showBar(
    byId("slots-bar"),
    byId("slots-legend"),
    page.slots.map((part) => ({
      share: part.slots, place: COLOURS[part.use] ?? 7, text: `${number(part.slots)} ${part.name} (${percent(part.slots / total)})`,
    })),
    page.slots.map((part) => `${part.slots} ${part.name}`).join(", "),
  );
}

function showQueue(queue) {
  showTable("queue", queue, {
    key: (job) => job.job,
    className: (job) => (job.fits ? "" : "misfit"),
    wide: [6],
    cells: (job) => [
      String(job.position), job.job, job.asks, String(job.priority), job.submitter ? `${moment(job.since)} by ${job.submitter}` : moment(job.since),
      job.starts_in_s === null ? (job.fits ? "not known" : "never, as it is") : `in ${seconds(job.starts_in_s)}`, job.why,
    ],
  });
}

function showJobs(jobs) {
  showTable("jobs", jobs, {
    key: (job) => job.job,
    className: (job) => job.state,
    wide: [6],
    cells: (job) => [
      (cell) => cell.append(linkTo(job.job)), job.by_hand ? `${job.state}, by hand` : job.state, job.asks,
      job.step === null ? "–" : job.total ? `${number(job.step)} of ${number(job.total)}` : number(job.step),
      number(job.steps_per_s), seconds(job.left_s), job.by_hand && job.nodes.length ? `on ${job.nodes.join(", ")}; ${job.why}` : job.why,
    ],
  });
}

function showNodes(nodes) {
  showTable("members", nodes, {
    key: (node) => node.name,
    version: (node) => JSON.stringify(node.jobs),
    className: (node) => node.health,
    wide: [3, 4],
    cells: (node) => [
      node.name, node.health, `${node.taken} of ${node.slots}`,
      (cell) => {
        if (!node.jobs.length) cell.textContent = "–";
        for (const { job, slots, state } of node.jobs) {
          const places = slots && `, slot ${slots}`;
          const item = element("div");
          item.append(linkTo(job), ` (${state}${places})`);
          cell.append(item);
        }
      },
      [node.why, ...node.labels].filter(Boolean).join("; ") || "–",
    ],
  });
}

function showEnded(jobs) {
  showTable("ended", jobs, {
    key: (job) => `${job.job} ${job.at}`,
    className: (job) => (job.exit_code ? "failed" : ""),
    wide: [3],
    cells: (job) => [
      job.at ? moment(job.at) : "–", (cell) => cell.append(linkTo(job.job)), job.exit_code === null ? "–" : String(job.exit_code),
      job.by_hand ? `${job.why} (started by hand)` : job.why,
    ],
  });
}

function show(page) {
  last = page;
  showHead(page);
  showQueue(page.queue);
  showJobs(page.jobs);
  showNodes(page.nodes);
  showEnded([...page.absent, ...page.ended]);
}

keepAsking(show, (trouble) => showStale(trouble, last));
