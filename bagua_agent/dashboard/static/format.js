// Turns numbers and times into short texts. Pure.

const PLACES = 3;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toPrecision(PLACES)} ms`;
  if (value < 100) return `${value.toPrecision(PLACES)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 120) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at ? value.toPrecision(PLACES) : Math.round(value)} ${units[at]}`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(1)} %`;
}

export function clock(unixSeconds) {
  return unixSeconds ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB") : "–";
}

// The time of day, with the date where it is not today's.
export function moment(unixSeconds) {
  if (!unixSeconds) return "–";
  const at = new Date(unixSeconds * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}
