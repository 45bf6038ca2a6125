// Keys, and what changes while a run is going on. Without it every page works all the same.
"use strict";

const POLL_MS = 3000;

function items() {
  return [...document.querySelectorAll("[data-item]")];
}

function move(by) {
  const all = items();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

const keys = {
  j: () => move(1),
  k: () => move(-1),
  "/": () => document.querySelector("input[type=search]")?.focus(),
  u: () => [...document.querySelectorAll(".crumbs a")].pop()?.click(),
  "?": () => document.getElementById("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

function isBusy() {
  const main = document.getElementById("main");
  const reading = main.querySelector("details[open]") || !document.getSelection().isCollapsed;
  return document.hidden || reading || (main.contains(document.activeElement) && document.activeElement !== main);
}

async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.getElementById("main").replaceWith(page.getElementById("main"));
  const { changed } = page.body.dataset;
  if (changed) document.body.dataset.changed = changed;
  else delete document.body.dataset.changed;
  document.querySelector(".live")?.toggleAttribute("hidden", !changed);
}

async function follow() {
  let known = null;
  for (;;) {
    const address = document.body.dataset.changed;
    if (!address) return;
    try {
      if (!document.hidden) {
        const mark = await (await fetch(address)).text();
        if (known === null) known = mark;
        else if (mark !== known && !isBusy()) {
          await refresh();
          known = mark;
        }
      }
    } catch {
      document.querySelector(".live")?.replaceChildren("not connected");
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

follow();
