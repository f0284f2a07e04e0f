"use strict";
{# Served as it is: the page asks for the answer to its controls, and shows news of the search until it is final. #}
const element = (id) => document.getElementById(id);
const form = element("controls");
const pins = new Set([...document.querySelectorAll("[data-unpin]")].map((button) => button.dataset.unpin));
const vary = element("vary");
const given = new URLSearchParams(location.search);
let kept = given.get("kept") ?? "";
let grid = given.getAll("grid");
let asked = 0;
let timer = 0;

function ownQuery() {
  const found = new URLSearchParams();
  for (const field of form.elements) {
    if (field.name && field.value !== "" && field.value !== field.dataset.given) found.append(field.name, field.value);
  }
  for (const pin of [...pins].sort()) found.append("pin", pin);
  return found;
}

function query() {
  const found = ownQuery();
  if (kept !== "") found.append("kept", kept);
  for (const values of grid) found.append("grid", values);
  return found.toString();
}

function showPins() {
  element("pins").replaceChildren(...[...pins].sort().map((pin) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.unpin = pin;
    button.textContent = `${pin} ×`;
    button.setAttribute("aria-label", `remove the pin ${pin}`);
    item.append(button);
    return item;
  }));
}

function show(answer) {
  element("status").textContent = answer.status;
  element("answer").setAttribute("aria-busy", String(!answer.answered));
  element("stop").hidden = !answer.searching;
  const progress = element("progress");
  progress.hidden = !answer.searching;
  if (answer.share === null) progress.removeAttribute("value"); else progress.value = answer.share;
  if (answer.html !== null) element("answer").innerHTML = answer.html;
  if (answer.grid !== null) element("points").innerHTML = answer.grid;
  element("unvary").hidden = grid.length === 0;
  document.title = answer.title;
}

async function ask(state = query()) {
  const mine = ++asked;
  if (!form.checkValidity()) {
    const wrong = form.querySelector(":invalid");
    element("status").textContent = `${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`;
    element("answer").setAttribute("aria-busy", "false");
    return;
  }
  history.replaceState(null, "", state ? `?${state}` : location.pathname);
  let have = "";
  while (mine === asked) {
    let answer;
    try {
      const response = await fetch(`answer?${state}&have=${encodeURIComponent(have)}`);
      if (!response.ok) throw new Error(response.statusText);
      answer = await response.json();
    } catch (error) {
      element("status").textContent = "The explorer does not answer; is its process still running?";
      return;
    }
    if (mine !== asked) return;
    if (answer.version !== have) show(answer);
    have = answer.version;
    if (answer.final) return;
  }
}

function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => ask(), 250);
}

async function post(what) {
  await fetch(`${what}?${query()}`, { method: "POST" });
}

function pin(text) {
  const key = text.slice(0, text.indexOf("="));
  for (const other of pins) if (other.startsWith(`${key}=`)) pins.delete(other);
  pins.add(text);
  showPins();
  element("status").focus();
  ask();
}

form.addEventListener("input", askSoon);
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
element("why").addEventListener("submit", (event) => {
  event.preventDefault();
  const { stage, key, value } = event.target.elements;
  pin(`${stage.value}.${key.value}=${value.value.replaceAll(" ", "")}`);
});
vary.addEventListener("submit", (event) => {
  event.preventDefault();
  grid = [...vary.elements].filter((field) => field.name && field.value.trim() !== "")
    .map((field) => `${field.name}=${field.value.replaceAll(" ", "")}`);
  element("status").focus();
  ask();
});
element("unvary").addEventListener("click", () => {
  grid = [];
  element("status").focus();
  ask();
});
element("keep").addEventListener("click", () => {
  kept = ownQuery().toString();
  ask();
});
element("stop").addEventListener("click", () => post("stop"));
element("reset").addEventListener("click", () => {
  for (const field of form.elements) if (field.name) field.value = field.dataset.given;
  pins.clear();
  kept = "";
  grid = [];
  showPins();
  ask();
});
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.pin) pin(button.dataset.pin);
  if (button.dataset.unpin) { pins.delete(button.dataset.unpin); showPins(); element("status").focus(); ask(); }
  if (button.id === "again" || button.id === "resume") { await post(button.id); ask(); }
});
ask(location.search.slice(1));
