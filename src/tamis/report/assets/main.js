// Putting it together.

function tabs() {
  if (!content.overview) return;
  const parts = { overview: 'Overview', explorer: 'Explorer' };
  for (const [part, text] of Object.entries(parts))
    byId('tabs').append(button(text, () => go({ part }), { 'data-part': part }));
}

// Names of parts are no names of elements: the browser would jump to the one that the address names, past the header.
function showPart() {
  for (const part of ['overview', 'explorer']) byId(`part-${part}`).hidden = state.part !== part;
  for (const tab of byId('tabs').children)
    tab.setAttribute('aria-current', tab.dataset.part === state.part ? 'page' : 'false');
  tip.hide();
  if (state.part === 'overview') redraw();
}

function main() {
  theme.start();
  byId('tools').append(
    button('\u25d1', theme.toggle, { 'aria-label': 'light or dark', title: 'light or dark (d)' }),
    button('?', toggleHelp, { 'aria-label': 'help', title: 'help (?)' }),
  );
  tabs();
  help();
  watchers.push(showPart);
  explorer();
  if (content.overview) overview();
  keyboard();
  const follow = () => go(fromHash(location.hash));
  addEventListener('hashchange', follow);
  follow();
  document.body.dataset.ready = 'yes';
}

main();
