"""Pictures as a browser lays them out: whole at every load, whatever the frame does."""

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import pytest

from jgraph.graph.device import device
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.schedule import schedule
from jgraph.view.svg import Picture
from tests.support.chromium import CHROMIUM, needs_chromium

LOADS: Final = 12
FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--window-size=1000,800", "--timeout=60000"),
    *("--virtual-time-budget=20000", "--dump-dom"),
)

PAGE: Final = """<!doctype html><body style="margin:0;width:900px"><script>
var pages=%s,loads=%d,left=loads,found=[];
function look(n,frame){
  var svg=frame.contentDocument.querySelector("svg"),
      view=svg.querySelector(".view").getBoundingClientRect(),
      whole=svg.getBoundingClientRect();
  found.push({load:n,width:whole.width,height:whole.height,left:view.left,
    top:view.top,right:view.right,bottom:view.bottom,drawn:view.width});
  if(!--left)document.body.textContent="RESULT"+JSON.stringify(found)+"END";
}
function load(n){
  var holder=document.createElement("div"),frame;
  holder.innerHTML=pages[n%%pages.length];frame=holder.firstChild;
  frame.removeAttribute("sandbox");  // so that this page can look into it
  if(n%%5==1)holder.style.display="none";
  if(n%%5==2)holder.style.width="0px";
  if(n%%5==3)frame.style.maxHeight="0px";
  if(n%%5==4)holder.style.width="2000px";
  frame.onload=function(){
    setTimeout(function(){
      holder.style.display="";holder.style.width="900px";
      if(n%%5==3)frame.style.maxHeight="500px";
      setTimeout(function(){look(n,frame);},200);
    },20*(n%%7));
  };
  document.body.appendChild(holder);
}
for(var n=0;n<loads;n++)load(n);
</script>"""


def graph_of(layers: int) -> Picture:
    w = Variable("w", jnp.ones((3, 3)), device="/job:ps/task:0")

    def step(x: Any) -> Any:
        for i in range(layers):
            with device(f"/job:worker/task:{i % 2}"):
                x = jnp.tanh(x @ w[...])
        return x

    return trace(step, jnp.ones((3, 3)))[0].show()


@pytest.mark.slow
@pytest.mark.procs
@needs_chromium
def test_pictures_are_whole_in_each_of_many_loads(tmp_path: Path) -> None:
    timed = schedule("1f1b", stages=4, tasks=4, microbatches=16)
    pictures = [graph_of(1), graph_of(12), timed.show()]
    frames = json.dumps([picture._repr_html_() for picture in pictures])
    page = tmp_path / "page.html"
    page.write_text(PAGE % (frames.replace("</", "<\\/"), LOADS), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    dumped = subprocess.run(
        [*command, page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    result = re.search("RESULT(.*)END", dumped, re.DOTALL)
    assert result, dumped[-2000:]
    loads = json.loads(unescape(result[1]))
    assert sorted(load["load"] for load in loads) == list(range(LOADS))
    for load in loads:
        assert load["drawn"] > 50, load
        assert load["left"] >= -1, load
        assert load["top"] >= -1, load
        assert load["right"] <= load["width"] + 1, load
        assert load["bottom"] <= load["height"] + 1, load
