// A conversation by /v1/chat/completions, streamed.

const $ = (id) => document.getElementById(id);
const FIELDS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** The objects of a stream of server-sent events. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Sampling parameters as far as they are filled in; null if one is not valid. */
function sampling() {
  const chosen = {};
  for (const name of FIELDS) {
    const field = $(name);
    if (!field.reportValidity()) return null;
    if (field.value !== "") chosen[name] = Number(field.value);
  }
  return chosen;
}

function element(parent, tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

/** Wire the chat up. `mine(id)` is told the id of the answer that streams, null at its end. */
export function startChat(call, mine) {
  const chat = { model: null };
  const log = $("log"), message = $("message");
  let turns = []; // what the server is sent
  let running = null; // aborts the answer

  function follow() {
    log.scrollTop = log.scrollHeight;
  }

  function add(role, text) {
    $("empty").hidden = true;
    const turn = element(log, "div", `turn ${role}`);
    element(turn, "span", "hidden", role === "user" ? "You: " : "Answer: ");
    const thought = element(turn, "span", "thought");
    thought.hidden = true;
    const body = element(turn, "span", "text", text);
    const meta = element(turn, "span", "meta");
    meta.hidden = true;
    return { turn, thought, body, meta };
  }

  function busy(on) {
    $("send").hidden = on;
    $("stop").hidden = !on;
    $("clear").disabled = on;
  }

  async function answer(parameters) {
    running = new AbortController();
    const shown = add("assistant", "");
    shown.turn.classList.add("streaming");
    busy(true);
    const began = performance.now();
    let first = null, usage = null, reason = null, text = "";
    try {
      const stream = await call("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          model: chat.model ?? undefined,
          messages: turns,
          stream: true,
          stream_options: { include_usage: true },
          ...parameters,
        }),
        signal: running.signal,
      });
      for await (const chunk of events(stream)) {
        if (chunk.error) throw new Error(chunk.error.message);
        mine(chunk.id);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const thought = choice.delta.reasoning ?? choice.delta.reasoning_content;
        if (thought || choice.delta.content) first ??= performance.now();
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
        if (thought) {
          shown.thought.hidden = false;
          shown.thought.textContent += thought;
        }
        if (choice.delta.content) {
          text += choice.delta.content;
          shown.body.append(choice.delta.content);
        }
        reason = choice.finish_reason ?? reason;
        if (atEnd) follow();
      }
    } catch (error) {
      reason = error.name === "AbortError" ? "stopped" : "failed";
      if (reason === "failed") {
        shown.turn.classList.add("failed");
        shown.body.append(`${text ? "\n" : ""}${error.message}`);
      }
    }
    finish(shown, { began, first, usage, reason });
    // A failed question is not asked again with the next one.
    if (text) turns.push({ role: "assistant", content: text });
    else turns.pop();
  }

  function finish(shown, { began, first, usage, reason }) {
    running = null;
    mine(null);
    busy(false);
    shown.turn.classList.remove("streaming");
    const notes = [];
    if (usage) notes.push(`${usage.completion_tokens} tokens`);
    if (first !== null) {
      notes.push(`first after ${Math.round(first - began)} ms`);
      const seconds = (performance.now() - first) / 1000;
      if (usage?.completion_tokens > 1 && seconds > 0.1) {
        notes.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} / s`);
      }
    }
    if (reason) notes.push(reason);
    shown.meta.textContent = notes.join(" · ");
    shown.meta.hidden = false;
    $("announce").textContent = `Answer ${reason === "failed" ? "failed" : "complete"}: ${shown.body.textContent}`;
    follow();
  }

  $("composer").onsubmit = (event) => {
    event.preventDefault();
    const text = message.value.trim();
    const parameters = sampling();
    if (!text || running || !parameters) return;
    turns.push({ role: "user", content: text });
    add("user", text);
    message.value = "";
    follow();
    answer(parameters);
  };
  message.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("key-dialog").open) running?.abort();
  });
  $("stop").onclick = () => {
    running?.abort();
    message.focus();
  };
  $("clear").onclick = () => {
    turns = [];
    for (const turn of [...log.querySelectorAll(".turn")]) turn.remove();
    $("empty").hidden = false;
    message.focus();
  };
  return chat;
}
