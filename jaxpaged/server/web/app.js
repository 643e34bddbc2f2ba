// The page: asks for the key when the server wants one, and starts the chat and the engine's view.

import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";

const KEY = "jaxpaged-key";
const $ = (id) => document.getElementById(id);

let asking = null; // the promise of a key while the dialog is open
let declined = false; // the dialog was cancelled: it opens again only by its button

/** Fetch with the key; asks for one on 401 and tries again. Throws an Error in the server's words. */
async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => null);
    if (answer.status !== 401) {
      const error = new Error(body?.error?.message ?? `the server answered ${answer.status}`);
      error.status = answer.status;
      throw error;
    }
    // Another call may have got a key meanwhile.
    if (sessionStorage.getItem(KEY) !== key) continue;
    if (declined) throw noKey();
    await askKey(key !== null);
  }
}

function noKey() {
  return Object.assign(new Error("an API key is needed"), { status: 401 });
}

function askKey(refused) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = $("key-dialog");
    $("key-why").textContent = refused
      ? "The server refused that key."
      : "This server wants a key. It is kept until this tab is closed.";
    $("key").value = "";
    let given = false;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value.trim());
      given = true;
      dialog.close();
    };
    $("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      $("key-button").hidden = false;
      declined = !given;
      if (given) resolve();
      else reject(noKey());
    };
    dialog.showModal();
  });
  return asking;
}

async function start() {
  const engine = startEngine(call);
  const chat = startChat(call, engine.mine);
  $("key-button").onclick = () => askKey(false).then(load, () => {}).then(engine.resume);
  async function load() {
    try {
      const models = await (await call("v1/models")).json();
      chat.model = models.data[0].id;
      $("model").textContent = chat.model;
    } catch (error) {
      console.debug(error.message);
    }
  }
  $("sampling").open = matchMedia("(min-width: 861px)").matches;
  await load();
  engine.resume();
}

start();
