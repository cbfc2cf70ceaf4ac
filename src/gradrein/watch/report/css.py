"""How the page looks: light and dark, wide and narrow, on screen and on paper."""

CSS = """
:root { color-scheme: light dark; --ground:#fbfaf8; --card:#fff; --ink:#1c1b19; --soft:#6b675f; --line:#e6e2da;
  --a:#2563c9; --b:#d2691e; --c:#3b8f5b; --d:#8a5cc2; --hot:#b3261e; --level:#8a5cc2; }
@media (prefers-color-scheme: dark) { :root { --ground:#16171a; --card:#1e2024; --ink:#eceae6; --soft:#a09c94;
  --line:#34363c; --a:#7aa8ff; --b:#ffab6b; --c:#7fd0a0; --d:#c8a4f5; --hot:#ff8a80; --level:#c8a4f5; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink); font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width:68rem; margin:0 auto; padding:2rem 1.25rem 4rem; }
h1 { font-size:1.7rem; line-height:1.2; margin:0 0 .3rem; letter-spacing:-.01em; overflow-wrap:anywhere; }
h2 { font-size:1.1rem; margin:0 0 .2rem; }
h3 { font-size:1.02rem; margin:0 0 .35rem; line-height:1.35; overflow-wrap:anywhere; }
p { margin:.2rem 0 .7rem; } .lead,.hint,.test { color:var(--soft); } .hint,.test { font-size:.87rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:.75rem; padding:1.1rem 1.25rem; margin:1.1rem 0; }
.plot { display:grid; grid-template-columns:3.4rem 1fr; grid-template-rows:15rem 1.2rem auto; margin-top:.6rem; }
.area { position:relative; border-left:1px solid var(--line); border-bottom:1px solid var(--line); }
.area svg { position:absolute; inset:0; width:100%; height:100%; overflow:hidden; }
.ys,.xs { position:relative; font-size:.75rem; color:var(--soft); font-variant-numeric:tabular-nums; }
.ys span { position:absolute; right:.45rem; transform:translateY(-50%); white-space:nowrap; }
.xs { grid-column:2; } .xs span { position:absolute; top:.15rem; transform:translateX(-50%); white-space:nowrap; }
.xl { grid-column:2; text-align:right; font-size:.75rem; color:var(--soft); }
.area .at { position:absolute; right:.3rem; transform:translateY(-105%); font-size:.75rem; color:var(--level);
  background:color-mix(in srgb,var(--card) 80%,transparent); padding:0 .25rem; border-radius:.2rem; }
svg path,svg line { vector-effect:non-scaling-stroke; fill:none; }
.grid { stroke:var(--line); stroke-width:1; } .mark { stroke:var(--hot); stroke-width:1; opacity:.45; }
line.level { stroke:var(--level); stroke-width:1.5; stroke-dasharray:5 4; } .tick { stroke:var(--level); stroke-width:1; }
.line { stroke-width:1.4; stroke-linejoin:round; } .dots { stroke-width:5; stroke-linecap:round; }
path.a { stroke:var(--a); } path.b { stroke:var(--b); } path.c { stroke:var(--c); } path.d { stroke:var(--d); } path.pale { opacity:.45; }
.legend { display:flex; flex-wrap:wrap; gap:.2rem 1.1rem; font-size:.85rem; margin:.3rem 0 0; }
.legend span::before { content:""; display:inline-block; width:1rem; height:.22rem; border-radius:1px; margin-right:.45rem;
  vertical-align:.25em; background:var(--a); }
.legend .b::before { background:var(--b); } .legend .c::before { background:var(--c); } .legend .d::before { background:var(--d); }
.legend .pale::before { opacity:.45; }
.scroll { overflow-x:auto; } table { border-collapse:collapse; font-size:.88rem; font-variant-numeric:tabular-nums; width:100%; }
th,td { text-align:left; padding:.32rem .8rem .32rem 0; border-bottom:1px solid var(--line); vertical-align:top; overflow-wrap:anywhere; }
th { font-weight:600; color:var(--soft); } td.n,th.n { text-align:right; white-space:nowrap; } tr.pick td { font-weight:650; }
article { border-top:1px solid var(--line); padding:1rem 0 .3rem; } article:first-of-type { border-top:0; }
.do { border-left:3px solid var(--c); padding-left:.75rem; }
code { font:.9em ui-monospace,monospace; background:color-mix(in srgb,var(--line) 55%,transparent); padding:.08em .35em;
  border-radius:.25rem; overflow-wrap:anywhere; }
.verdict { font-size:1.08rem; margin:.2rem 0; } ol.actions { padding-left:1.3rem; } ol.actions li { margin:.2rem 0 .9rem; }
pre { background:color-mix(in srgb,var(--line) 45%,transparent); border-radius:.4rem; padding:.6rem .8rem; overflow-x:auto;
  font:.85rem/1.45 ui-monospace,monospace; margin:.3rem 0; }
.good { color:var(--c); } .slug { color:var(--soft); font:.78rem ui-monospace,monospace; }
@media (max-width:40rem) { main { padding:1.1rem .7rem 3rem; } section { padding:.9rem .8rem; }
  .plot { grid-template-columns:2.7rem 1fr; grid-template-rows:12rem 1.2rem auto; } h1 { font-size:1.35rem; }
  th,td { padding-right:.5rem; } th { font-size:.8rem; } .xs span:nth-child(even) { display:none; } }
@media print { :root { --ground:#fff; } body { font-size:11pt; } section,article { break-inside:avoid; }
  main { max-width:none; padding:0; } * { print-color-adjust:exact; -webkit-print-color-adjust:exact; } }
"""  # noqa: E501
