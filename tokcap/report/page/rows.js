// Rows of one height, of which only those in view are elements.

class Rows {
  /** element: scrolls. make(index): a row, positioned here. */
  constructor(element, height, make) {
    this.element = element;
    this.height = height;
    this.make = make;
    this.count = 0;
    this.shown = new Map();
    this.inner = h("div", { class: "rows", role: "presentation" });
    element.append(this.inner);
    element.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(element);
  }

  setCount(count) {
    this.count = count;
    this.inner.style.height = count * this.height + "px";
    this.again();
  }

  /** Make every row in view again. */
  again() {
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const top = this.element.scrollTop,
      tall = this.element.clientHeight || 400;
    const first = Math.max(0, Math.floor(top / this.height) - 6);
    const end = Math.min(this.count, Math.ceil((top + tall) / this.height) + 6);
    for (const [index, row] of this.shown) {
      if (index < first || index >= end) {
        row.remove();
        this.shown.delete(index);
      }
    }
    let before = this.inner.firstChild;
    for (let index = first; index < end; index++) {
      let row = this.shown.get(index);
      if (!row) {
        row = this.make(index);
        row.style.transform = "translateY(" + index * this.height + "px)";
        this.shown.set(index, row);
        this.inner.insertBefore(row, before);
      }
      before = row.nextSibling;
    }
  }

  reveal(index) {
    const top = index * this.height,
      view = this.element;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + this.height > view.scrollTop + view.clientHeight)
      view.scrollTop = top + this.height - view.clientHeight;
    this.draw();
  }
}
