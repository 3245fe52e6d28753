// The search of the site needs a worker, and browsers start none for a page from the file system.
// There, a hidden frame runs the worker's script, and stands in for it. Elsewhere this does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      const inner = this.frame.contentDocument;
      inner.open();
      inner.write(`<script>
        self.postMessage = data => parent.postMessage(data, "*");
        self.importScripts = (...urls) => Promise.all(urls.map(url => new Promise(done => {
          const script = document.createElement("script");
          Object.assign(script, {src: url, async: false, onload: done});
          document.head.append(script);
        })));
      </` + `script><script src="${url}"></` + `script>`);
      inner.close();
      this.frame.addEventListener("load", () => {
        this.waiting.splice(0).forEach(data => this.send(data));
        this.waiting = null;
      });
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.send(data);
    }
    send(data) {
      const MessageOf = this.frame.contentWindow.MessageEvent;
      this.frame.contentWindow.dispatchEvent(new MessageOf("message", {data}));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
