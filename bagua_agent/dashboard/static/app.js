// Asks the agent for the job's data once a second and shows it. What the page says is decided by the agent.

import { Chart } from "./charts.js";
import { keepAsking, problem, showStale, showBar, showFacts, showVerdict } from "./common.js";
import { byId, element, rows, setText } from "./dom.js";
import { bytes, moment, number, percent, seconds } from "./format.js";
import { Heat } from "./heat.js";
import { Panel } from "./panel.js";

const SLOWER_BY = 1.5;
// There a daemon or a command serves this page, so no agent of the job takes its place.
const isBelowCluster = location.pathname !== "/";

const panel = new Panel();
const speed = new Chart(byId("speed"), "steps/s", "--u0", true);
const metricChart = new Chart(byId("metric-chart"), "", "--u4");
const heat = new Heat(byId("heat"), byId("heat-cell"));
let last = null;

function showHead(page) {
  showVerdict(page.verdict, page.job);
  setText(byId("job"), page.job);
  setText(byId("served"), `${page.served_by ? `served by the ${isBelowCluster ? "daemon" : "agent"} of ${page.served_by}, ` : ""}as of ${moment(page.at)}`);
}

function showNow(page) {
  const now = page.progress;
  const facts = [
    ["Step", now.total ? `${number(now.step)} of ${number(now.total)}` : number(now.step || null)],
    ["Steps per second", number(now.steps_per_s)],
    ["Samples per second", number(now.samples_per_s)],
    ["Remaining", seconds(now.eta_s)],
    ["Workers", number(now.world_size)],
    ["Nodes", `${now.nodes} of ${now.min_nodes === now.max_nodes ? now.max_nodes : `${now.min_nodes} to ${now.max_nodes}`}`],
    ["Generation", number(now.generation)],
    ["Goodput", percent(page.goodput.share)],
    ...(now.checkpoint ? [["Checkpoint of step", number(now.checkpoint)]] : []),
    ...Object.entries(page.metrics).slice(0, 4).map(([name, value]) => [`Mean ${name}`, number(value)]),
  ];
  showFacts(byId("facts"), facts);
  const bar = byId("progress");
  bar.hidden = !now.total;
  bar.value = now.total ? now.step / now.total : 0;
}

function showGoodput({ parts, share, computing_share: computing }) {
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const order = ["step", "failed_step", "hang", "failover", "switch", "heal", "checkpoint", "waiting", "standby", "start"];
  const shown = parts.map((part) => ({
    share: part.seconds / total,
    text: `${part.name} ${seconds(part.seconds)} (${percent(part.seconds / total)})`,
    place: Math.max(0, order.indexOf(part.use)),
  }));
  const said = parts.map((part) => `${part.name} ${percent(part.seconds / total)}`).join(", ");
  showBar(byId("goodput-bar"), byId("goodput-legend"), shown, `Goodput ${percent(share)}; ${said}`);
  setText(
    byId("computing"),
    computing === null ? "" : `In steps the workers computed ${percent(computing)} of the time and waited for others and the network ${percent(1 - computing)}.`,
  );
}

function showCharts(page) {
  const { at, steps_per_s: rates, metrics } = page.series;
  const marks = page.generations.map((g) => ({ at: g.in_force_at ?? g.at, number: g.number, kind: g.kind }));
  speed.show(at, rates, marks);
  const names = Object.keys(metrics);
  const select = byId("metric");
  if ([...select.options].map((o) => o.value).join() !== names.join()) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    if (!names.includes(chosen) && names.includes("loss")) select.value = "loss";
  }
  select.disabled = !names.length;
  if (!names.length && !select.options.length) select.append(new Option("nothing: call bagua.report()", ""));
  metricChart.show(at, metrics[select.value] ?? at.map(() => null), marks, select.value);
}

function showTimeline(generations) {
  rows(byId("timeline"), [...generations].reverse(), {
    key: (g) => g.number,
    className: (g) => g.kind,
    wide: [5],
    cells: (g) => [
      moment(g.at), String(g.number), g.kind, String(g.world_size),
      g.cost_s ? seconds(g.cost_s) : g.is_pending ? "…" : "–",
      g.text + (g.members.length ? ` — ${g.members.join("; ")}` : ""),
    ],
  });
}

function workerName(worker) {
  return `${worker.rank === null ? "slot" : `rank ${worker.rank}, slot`} ${worker.slot} of ${worker.node}`;
}

function showWorkers(workers) {
  const times = workers.map((w) => w.computing_s).filter((v) => v !== null).sort((a, b) => a - b);
  const middle = times.length > 1 ? times[Math.floor((times.length - 1) / 2)] : Infinity;
  rows(byId("workers"), workers, {
    key: (w) => `${w.agent} ${w.slot}`,
    version: (w) => workerName(w),
    className: (w) => (w.computing_s > SLOWER_BY * middle ? "slow" : ""),
    cells: (w) => [
      w.rank === null ? "none" : String(w.rank), w.node, String(w.slot), w.step === null ? "–" : number(w.step),
      w.computing_s === null ? "–" : `${seconds(w.computing_s)} a step`,
      (cell) => {
        const worker = { agent: w.agent, slot: w.slot, name: workerName(w) };
        const log = element("button", "Output");
        const stacks = element("button", "Stacks");
        const collectives = element("button", "Collectives");
        log.type = stacks.type = collectives.type = "button";
        log.setAttribute("aria-label", `Output of ${worker.name}`);
        stacks.setAttribute("aria-label", `Stacks of ${worker.name}`);
        collectives.setAttribute("aria-label", `Collectives of ${worker.name}`);
        log.addEventListener("click", () => panel.openLog(worker));
        stacks.addEventListener("click", () => panel.openStacks(worker));
        collectives.addEventListener("click", () => panel.openCollectives(worker));
        cell.append(log, stacks, collectives);
      },
    ],
  });
}

function showNetwork(workers) {
  rows(byId("network"), workers, {
    key: (w) => `${w.agent} ${w.slot}`,
    cells: ({ network: n, ...w }) => [
      w.rank === null ? "none" : String(w.rank), w.node, String(w.slot), n.interface ?? "–",
      n.sent_per_s === null ? "–" : `${bytes(n.sent_per_s)}/s`, bytes(n.sent_a_step), bytes(n.sent_bytes),
      n.compression === null ? "–" : `${number(n.compression)} : 1`, bytes(n.net_bytes),
      n.heal_bytes ? `${bytes(n.heal_bytes)} in ${seconds(n.heal_s)}` : "–",
      w.heal_s ? seconds(w.heal_s) : "–",
    ],
  });
}

function showNodes(nodes) {
  rows(byId("nodes"), nodes, {
    key: (n) => n.agent,
    version: (n) => n.dashboard,
    cells: (n) => [
      n.name + (n.leads ? " (leads)" : ""), n.state, n.ranks.join(", ") || "–", String(n.slots), n.etcd ? "answers" : "away",
      (cell) => {
        if (!n.dashboard) {
          cell.textContent = "–";
          return;
        }
        const link = element("a", n.dashboard);
        link.href = addressOf(n.dashboard);
        cell.append(link);
      },
    ],
  });
}

function showFailures(failures, first) {
  const section = byId("failures");
  const before = byId(first ? "now" : "events-section");
  if (section.nextElementSibling !== before) before.parentNode.insertBefore(section, before);
  const isCause = first && failures[0]?.role !== "earlier";
  setText(byId("failures-title"), isCause ? "What failed first" : "Failures so far");
  section.hidden = !failures.length;
  const text = JSON.stringify(failures);
  if (section.dataset.shown === text) return;
  section.dataset.shown = text;
  byId("failure-list").replaceChildren(...failures.map((failure) => {
    const part = element("div", "", "failure");
    const head = element("p");
    const where = `${failure.node}, slot ${failure.slot}${failure.rank === null ? "" : `, rank ${failure.rank}`}`;
    head.append(element("strong", failure.role), `: ${failure.summary} (${where})`);
    part.append(head);
    if (failure.log_path) part.append(element("p", `Files: ${failure.log_path}`, "hint"));
    if (failure.traceback) {
      const trace = element("pre", failure.traceback);
      trace.tabIndex = 0;
      trace.setAttribute("role", "region");
      trace.setAttribute("aria-label", `Traceback of ${where}`);
      part.append(trace);
    }
    return part;
  }));
}

function showEvents(events) {
  rows(byId("events"), events.map((event, index) => ({ ...event, index })).reverse(), {
    key: (e) => `${e.index} ${e.at} ${e.text}`,
    className: (e) => e.kind,
    wide: [2],
    cells: (e) => [moment(e.at), e.node || "–", e.text],
  });
}

function show(page) {
  last = page;
  showHead(page);
  showFailures(page.failures, page.failures_first);
  showNow(page);
  showGoodput(page.goodput);
  showCharts(page);
  showTimeline(page.generations);
  heat.show(page.heat);
  showWorkers(page.workers);
  showNetwork(page.workers);
  showNodes(page.nodes);
  showEvents(page.events);
}

// Beyond loopback an agent's dashboard is served over TLS alone.
function addressOf(dashboard) {
  return `${/^(127\.|localhost:|\[::1\])/.test(dashboard) ? "http" : "https"}://${dashboard}/`;
}

// The agent of this page is gone: another agent of the job may serve one.
async function goElsewhere() {
  for (const node of last?.nodes ?? []) {
    if (!node.dashboard || node.dashboard === location.host) continue;
    try {
      await fetch(`${addressOf(node.dashboard)}healthz`, { mode: "no-cors", credentials: "include", signal: AbortSignal.timeout(2000) });
      location.replace(addressOf(node.dashboard));
      return;
    } catch {
      continue; // it is gone too
    }
  }
}

async function gone(trouble) {
  if (last?.over) {
    problem("The job is over and its agent has ended: this is the last that it said.");
  } else {
    showStale(trouble, last);
    if (!isBelowCluster) await goElsewhere();
  }
}

byId("metric").addEventListener("change", () => last && showCharts(last));
addEventListener("resize", () => last && (showCharts(last), heat.show(last.heat)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && (showCharts(last), heat.show(last.heat)));
byId("up").hidden = !isBelowCluster;
keepAsking(show, gone);
