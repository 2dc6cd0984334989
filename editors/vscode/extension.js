// Starts `peftc lsp` for specs, and ends it with the editor.
"use strict";

const vscode = require("vscode");
const { LanguageClient, TransportKind } = require("vscode-languageclient/node");

let client;

function activate(context) {
  const settings = vscode.workspace.getConfiguration("peftc");
  const [command, ...args] = settings.get("command");
  const server = { command, args, transport: TransportKind.stdio };
  client = new LanguageClient("peftc", "peftc", server, {
    documentSelector: [{ language: "peft" }],
    initializationOptions: { model: settings.get("model"), tasks: settings.get("tasks") },
    synchronize: {
      configurationSection: "peftc",
      fileEvents: vscode.workspace.createFileSystemWatcher("**/{*.peft,peftc.toml,pyproject.toml}"),
    },
  });
  context.subscriptions.push(client);
  return client.start();
}

function deactivate() {
  return client && client.stop();
}

module.exports = { activate, deactivate };
