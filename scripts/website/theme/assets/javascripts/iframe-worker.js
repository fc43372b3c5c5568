/* A page that is opened from the disk may start no worker: there the search runs in a hidden frame instead. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    #waiting = [];
    #frame = document.createElement("iframe");
    #loaded = false;
    onmessage = null;

    constructor(address) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inner = this.#frame.contentWindow;
      // Messages arrive later than they are sent, as those of a worker do.
      inner.postMessage = data => setTimeout(() => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      });
      const script = inner.document.createElement("script");
      script.src = address;
      script.addEventListener("load", () => {
        this.#loaded = true;
        this.#waiting.forEach(data => this.postMessage(data));
      });
      script.addEventListener("error", () => this.dispatchEvent(new Event("error")));
      inner.document.body.append(script);
    }

    postMessage(data) {
      if (!this.#loaded) this.#waiting.push(data);
      else setTimeout(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
