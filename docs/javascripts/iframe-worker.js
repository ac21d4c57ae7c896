// Browsers start no worker from a file: without a server, the search runs in a hidden frame that takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = source
          script.onload = resolve
          script.onerror = reject
          inside.document.body.append(script)
        })
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      this.ready = load(new URL(url, location)).then(() => inside)
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
