"""Style and script of pictures: zoom, drag, open, highlight."""

from typing import Final

POLICY: Final = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
"""Of a page with a picture: it may load nothing from anywhere."""

CLOSEST: Final = 0.8
"""Units of a drawing to a pixel, at least, as long as nobody zooms."""

STYLE: Final = """
.jg{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
background:#fff;cursor:grab;display:block}
.jg text{fill:#0f172a;font-size:12px}
.jg .trail{font-size:15px;font-weight:600}
.jg .trail .go{fill:#2563eb;cursor:pointer}.jg .trail .sep{fill:#94a3b8}
.jg .lane{stroke-width:1}
.jg .l0{fill:#eff6ff;stroke:#bfdbfe}.jg .l1{fill:#f0fdf4;stroke:#bbf7d0}
.jg .l2{fill:#fffbeb;stroke:#fde68a}.jg .l3{fill:#fdf4ff;stroke:#f5d0fe}
.jg .l4{fill:#ecfeff;stroke:#a5f3fc}.jg .l5{fill:#fff1f2;stroke:#fecdd3}
.jg .l6{fill:#f8fafc;stroke:#cbd5e1}
.jg .task{font-weight:650;font-size:13px}.jg .about,.jg .s{fill:#64748b;font-size:11px}
.jg .t{font-weight:550}
.jg .box rect{fill:#fff;stroke:#cbd5e1}.jg .box .bar{stroke:none;fill:#94a3b8}
.jg .box:hover>rect:not(.bar){stroke:#0f172a}.jg .more{cursor:zoom-in}
.jg .k-segment .bar{fill:#4f46e5}.jg .k-group .bar{fill:#0ea5e9}
.jg .k-variable rect{fill:#fffbeb;stroke:#fcd34d}.jg .k-variable .bar{fill:#d97706}
.jg .k-state .bar{fill:#f59e0b}
.jg .k-feed .bar,.jg .k-fetch .bar{fill:#16a34a}
.jg .k-feed rect,.jg .k-fetch rect{fill:#f0fdf4;stroke:#86efac}
.jg .k-rows .bar{fill:#9333ea}
.jg .k-context rect{fill:none;stroke-dasharray:4 3}.jg .k-context .bar{fill:none}
.jg .k-context .t{fill:#64748b;font-style:italic}
.jg .edge{fill:none;stroke:#94a3b8;stroke-width:1.3;marker-end:url(#jg-arrow)}
.jg .state{stroke:#d6b464;stroke-dasharray:3 3}
.jg .crosses{stroke:#ea580c;stroke-width:1.7}
.jg .bytes{font-size:10.5px;font-weight:600;fill:#c2410c;text-anchor:middle;
stroke:#fff;stroke-width:4;paint-order:stroke}
.jg .span rect{stroke:#fff;stroke-width:.6;fill:#64748b}
.jg .span text{fill:#fff;font-size:10.5px;pointer-events:none}
.jg .span:hover rect{stroke:#0f172a}
.jg .s-compute rect{fill:#4f46e5}.jg .s-forward rect{fill:#2563eb}
.jg .s-backward rect{fill:#16a34a}.jg .s-send rect{fill:#ea580c}
.jg .s-wait rect{fill:#e2e8f0}.jg .s-wait text{fill:#64748b}
.jg .s-queueing rect{fill:#fde68a}.jg .s-queueing text{fill:#92400e}
.jg .tick{stroke:#e2e8f0}
.jg .tick-text{fill:#64748b;font-size:10.5px;text-anchor:middle}
.jg .view.lit .box:not(.on),.jg .view.lit [data-ends]:not(.on){opacity:.22}
"""

SCRIPT: Final = """
(function(){"use strict";
var svg=document.currentScript.ownerSVGElement||document.documentElement,
    now=svg.querySelector(".view"),box,touched=false;
function set(b){box=b;svg.setAttribute("viewBox",b.join(" "));}
function fit(){
  var r=svg.getBoundingClientRect(),w=+now.dataset.w,h=+now.dataset.h,s;
  touched=false;
  if(!r.width||!r.height){set([0,0,w,h]);return;}
  s=Math.max(w/r.width,h/r.height,@CLOSEST@);
  set([(w-r.width*s)/2,0,r.width*s,r.height*s]);
}
function open(id){
  now.style.display="none";now=svg.getElementById(id);now.style.display="";fit();
}
function point(e){
  var p=new DOMPoint(e.clientX,e.clientY);
  return p.matrixTransform(svg.getScreenCTM().inverse());
}
svg.addEventListener("wheel",function(e){
  e.preventDefault();
  var p=point(e),k=Math.pow(1.0015,e.deltaY);
  touched=true;
  set([p.x-(p.x-box[0])*k,p.y-(p.y-box[1])*k,box[2]*k,box[3]*k]);
},{passive:false});
var held=null,moved=false;
svg.addEventListener("pointerdown",function(e){held=point(e);moved=false;});
svg.addEventListener("pointermove",function(e){
  if(!held||!e.buttons){held=null;return;}
  var p=point(e),dx=p.x-held.x,dy=p.y-held.y;
  if(moved||Math.abs(dx)+Math.abs(dy)>4){
    moved=touched=true;set([box[0]-dx,box[1]-dy,box[2],box[3]]);}
});
svg.addEventListener("pointerup",function(){held=null;});
svg.addEventListener("click",function(e){
  var target=e.target.closest("[data-view]");
  if(target&&!moved)open(target.dataset.view);
});
svg.addEventListener("dblclick",function(e){if(!e.target.closest("[data-view]"))fit();});
document.addEventListener("keydown",function(e){
  var up=now.querySelectorAll(".trail .go");
  if(e.key==="Escape"&&up.length)open(up[up.length-1].dataset.view);
});
svg.addEventListener("pointerover",function(e){
  var at=e.target.closest(".box,.edge"),on={},n;
  now.querySelectorAll(".on").forEach(function(x){x.classList.remove("on");});
  now.classList.toggle("lit",!!at);
  if(!at)return;
  at.classList.add("on");n=at.dataset.n;
  if(n===undefined)at.dataset.ends.split(" ").forEach(function(x){on[x]=1;});
  else now.querySelectorAll("[data-ends]").forEach(function(x){
    var ends=x.dataset.ends.split(" ");
    if(ends.indexOf(n)>=0){x.classList.add("on");ends.forEach(function(y){on[y]=1;});}
  });
  now.querySelectorAll(".box").forEach(function(x){
    if(on[x.dataset.n])x.classList.add("on");});
});
new ResizeObserver(function(){if(!touched)fit();}).observe(svg);fit();
})();
""".replace("@CLOSEST@", str(CLOSEST))
