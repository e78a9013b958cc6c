/* Search in pages opened from disk, where browsers start no workers: their script runs in a frame.
   The theme's own name for it is IFrameWorker; the site is in English, so nothing else is loaded. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      inside.document.open();
      inside.document.write("<!doctype html><body></body>");
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} could not be loaded`));
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      const told = () => new this.inside.MessageEvent("message", { data });
      this.ready.then(() => this.inside.dispatchEvent(told()));
    }
  };
}
