const dark = matchMedia('(prefers-color-scheme: dark)');
function draw(night) {
  const ink = night ? '#c3ccd9' : '#3b4657', grid = night ? '#2c3544' : '#e4e8ee';
  for (const node of document.querySelectorAll('script.figure')) {
    const figure = JSON.parse(node.textContent), layout = figure.layout;
    const clear = 'rgba(0,0,0,0)';
    Object.assign(layout, {paper_bgcolor: clear, plot_bgcolor: clear, font: {color: ink, size: 12}});
    for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) Object.assign(layout[name], {
      gridcolor: grid, linecolor: grid, zerolinecolor: grid});
    Plotly.react(node.previousElementSibling, figure.data, layout, {displayModeBar: false, responsive: true});
  }
}
draw(dark.matches);
dark.addEventListener('change', () => draw(dark.matches));
addEventListener('beforeprint', () => {
  for (const node of document.querySelectorAll('details')) node.open = true;
  draw(false);
});
addEventListener('afterprint', () => draw(dark.matches));
