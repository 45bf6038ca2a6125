// Keys, and what changes while a run is going on. Without it every page works all the same.
"use strict";

const POLL_MS = 2000;

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

// What an element is among its siblings, whatever came before it: a row of a list keeps its focus and selection.
const keyOf = (node) => node.dataset?.key ?? null;

const children = (node) => {
  const all = [...node.childNodes];
  return all.some(keyOf) ? all.filter((each) => each.nodeType !== Node.TEXT_NODE) : all;
};

// Makes `old` equal to `fresh` and touches only what differs, so that focus, selection, scroll and input stay.
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const wanted = children(fresh);
  const keys = new Set(wanted.map(keyOf));
  const before = children(old);
  const kept = new Map(before.filter(keyOf).map((each) => [keyOf(each), each]));
  let at = 0;
  const end = before.at(-1)?.nextSibling ?? null;
  for (const next of wanted) {
    while (at < before.length && keyOf(before[at]) && !keys.has(keyOf(before[at]))) before[at++].remove();
    const here = before[at];
    const match = keyOf(next) ? kept.get(keyOf(next)) : here && !keyOf(here) ? here : null;
    if (match && match.nodeName === next.nodeName) {
      if (match === here) at += 1;
      else {
        before.splice(before.indexOf(match, at), 1);
        old.insertBefore(match, here ?? end);
      }
      morph(match, next);
    } else {
      old.insertBefore(next, here ?? end);
    }
  }
  for (const left of before.slice(at)) left.remove();
}

async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  morph(document.getElementById("main"), page.getElementById("main"));
  const { changed } = page.body.dataset;
  if (changed) document.body.dataset.changed = changed;
  else delete document.body.dataset.changed;
}

async function follow() {
  const live = document.querySelector(".live");
  let known = null;
  while (document.body.dataset.changed) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden) continue;
    try {
      const answer = await fetch(document.body.dataset.changed);
      const mark = await answer.text();
      if (answer.ok && mark !== known) {
        await refresh();
        known = mark;
      }
      live.textContent = answer.ok ? "live" : "not connected";
    } catch {
      live.textContent = "not connected";
    }
  }
  live?.remove();
}

follow();
