"use strict";
document.querySelectorAll(".formula").forEach((place) => {
  katex.render(place.textContent, place, { displayMode: place.tagName === "DIV", throwOnError: true });
});
