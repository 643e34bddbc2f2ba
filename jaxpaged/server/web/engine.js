// The engine's load, polled from /engine_state while the page is seen.

import { Pool } from "./pool.js";

const $ = (id) => document.getElementById(id);
const BUSY_MS = 350, IDLE_MS = 1000, FAILED_MS = 3000;
const RATE_SECONDS = 2; // over which tokens a second are taken
const HISTORY = 80; // samples of the small curve
const SHOWN_OWNERS = 8;

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1, notation: "compact" });

function idOf(item) {
  return `${item.request_id} ${item.index}`;
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

/** Wire the view up; `resume()` starts it again after it gave up for want of a key. */
export function startEngine(call) {
  const pool = new Pool($("pool"), $("pointed"));
  pool.onchoose = () => last?.pool && showTable();
  const samples = []; // {time, tokens}, the last few seconds
  const history = []; // tokens a second
  let last = null, own = null, timer = null, stopped = true;

  function tell(text, kind) {
    if ($("state").textContent !== text) $("state").textContent = text;
    $("state").className = `state ${kind}`;
  }

  function rate(state) {
    samples.push({ time: state.time, tokens: state.generation_tokens });
    while (samples.length > 2 && state.time - samples[0].time > RATE_SECONDS) samples.shift();
    const first = samples[0];
    const passed = state.time - first.time;
    return passed > 0 ? (state.generation_tokens - first.tokens) / passed : 0;
  }

  function show(state) {
    const perSecond = rate(state);
    history.push(perSecond);
    if (history.length > HISTORY) history.shift();
    $("running").textContent = state.num_requests_running;
    $("waiting").textContent = state.num_requests_waiting;
    $("rate").textContent = number.format(perSecond);
    $("preemptions").textContent = number.format(state.num_preemptions);
    $("held").textContent = `${(state.kv_cache_usage * 100).toFixed(state.kv_cache_usage < 0.1 ? 1 : 0)} %`;
    $("hits").textContent = state.prefix_cache_queries
      ? `${Math.round((state.prefix_cache_hits / state.prefix_cache_queries) * 100)} %`
      : "–";
    const fresh = state.first_tokens - (last?.first_tokens ?? 0);
    if (fresh > 0) {
      const waited = state.first_token_seconds - (last?.first_token_seconds ?? 0);
      $("ttft").textContent = seconds(waited / fresh);
    }
    $("page-size").textContent = state.page_size;
    drawCurve();
    if (state.pool) {
      pool.show(state);
      const pages = state.num_pages.toLocaleString("en");
      const owner = state.num_engines > 1
        ? ` of engine ${state.engine} (there are ${state.num_engines})`
        : "";
      $("sampled").textContent = state.pool.stride > 1
        ? `One in ${state.pool.stride} of ${pages} pages${owner} is drawn.`
        : `All ${pages} pages${owner} are drawn.`;
      listOwners(newestFirst(state.pool.sequences));
    }
    last = state;
    if (state.pool) showTable();
  }

  function isOwn(item) {
    return own !== null && item.request_id.startsWith(`${own}-`);
  }

  function newestFirst(sequences) {
    return sequences.toReversed().sort((one, other) => isOwn(other) - isOwn(one));
  }

  /** The table of the chosen sequence, or of the newest. */
  function showTable() {
    const told = newestFirst(last.pool.sequences).filter((item) => item.table.length);
    const item = told.find((item) => idOf(item) === pool.chosen) ?? told[0];
    $("table-owner").textContent = !item ? "a request" : isOwn(item) ? "this chat" : item.request_id;
    const list = $("table"), wanted = item?.table ?? [];
    while (list.children.length > wanted.length) list.lastChild.remove();
    wanted.forEach((page, place) => {
      const chip = list.children[place] ?? list.appendChild(document.createElement("li"));
      const shared = pool.isShared(page);
      chip.textContent = page || "–";
      chip.className = page === 0 ? "gone" : shared ? "shared" : "";
      chip.style.background = page === 0 || shared ? "" : pool.colour(idOf(item));
      const begin = place * last.page_size;
      chip.title = `tokens ${begin} to ${begin + last.page_size - 1}: page ${page}`;
    });
  }

  function listOwners(sequences) {
    const list = $("owners");
    const ids = sequences.slice(0, SHOWN_OWNERS).map(idOf);
    // Rows stay what they are while their sequence lives: the focus is kept.
    for (const row of [...list.children]) if (!ids.includes(row.dataset.id)) row.remove();
    sequences.slice(0, SHOWN_OWNERS).forEach((item, place) => {
      const id = ids[place];
      let row = [...list.children].find((child) => child.dataset.id === id);
      row ??= newRow(list, id);
      if (list.children[place] !== row) list.insertBefore(row, list.children[place]);
      const [swatch, name, tokens, pages] = row.firstChild.children;
      swatch.style.background = pool.colour(id);
      name.textContent = isOwn(item) ? "this chat" : item.request_id;
      tokens.textContent = `${number.format(item.num_tokens)} tokens`;
      pages.textContent = item.num_pages === 1 ? "1 page" : `${number.format(item.num_pages)} pages`;
    });
    const hidden = sequences.length - ids.length;
    $("more").textContent = hidden > 0 ? `and ${hidden} more` : "";
  }

  function newRow(list, id) {
    const row = document.createElement("li");
    row.dataset.id = id;
    const button = document.createElement("button");
    button.type = "button";
    for (const name of ["swatch", "name", "amount", "amount"]) {
      const part = document.createElement(name === "swatch" ? "i" : "span");
      part.className = name;
      button.append(part);
    }
    button.onmouseenter = button.onfocus = () => pool.choose(id);
    button.onmouseleave = button.onblur = () => pool.choose(null);
    row.append(button);
    list.append(row);
    return row;
  }

  function drawCurve() {
    const canvas = $("spark"), ratio = devicePixelRatio;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const brush = canvas.getContext("2d");
    const top = Math.max(1, ...history), step = canvas.width / (HISTORY - 1);
    brush.beginPath();
    history.forEach((value, at) => {
      const x = canvas.width - (history.length - 1 - at) * step;
      brush.lineTo(x, canvas.height - 2 * ratio - (value / top) * (canvas.height - 4 * ratio));
    });
    brush.strokeStyle = getComputedStyle(canvas).getPropertyValue("--accent");
    brush.globalAlpha = 0.55;
    brush.lineWidth = 1.5 * ratio;
    brush.stroke();
  }

  async function poll() {
    timer = null;
    let pause = IDLE_MS;
    try {
      const state = await (await call("engine_state")).json();
      show(state);
      tell(state.num_requests_running ? "working" : "ready", "ok");
      if (state.num_requests_running || state.num_requests_waiting || own !== null) pause = BUSY_MS;
    } catch (error) {
      if (error.status === 401) {
        stopped = true;
        tell("locked", "bad");
        return;
      }
      tell(error.status ? "the engine is dead" : "no connection", "bad");
      pause = FAILED_MS;
    }
    if (!document.hidden) timer = setTimeout(poll, pause);
    else stopped = true;
  }

  function resume() {
    if (!stopped) return;
    stopped = false;
    poll();
  }

  function mine(id) {
    if (own === id) return;
    own = id;
    if (timer !== null) {
      clearTimeout(timer);
      poll();
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && last !== null) resume();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pool.draw());
  return { resume, mine };
}
